"""Paged prefill attention: chunks of many sequences, each behind its cached prefix, in one launch.

FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 1) over a block table. The new tokens' own keys
and values are in the pool already, so prefix and chunk are one context, and every key comes through
the table. Rows of a tile are (token, head of the KV head's group) pairs, token by token, so that
any group size fills the tensor cores and a key is loaded once for the whole group::

    row r of a sequence's n x GROUP:  token r // GROUP, head r % GROUP
    tiles of a step:                  tile_sequences[t], tile_starts[t] (its first row)
    token i sees the positions        0 .. start + i
    keys     |<------ whole tiles ------>|<-- masked tiles -->|
             0 ... start + first token of the tile ... start + last token of the tile
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.flash import attend_tile, load_tile
from engine.kernels.span import Span, block_tables
from engine.kernels.tuning import options, padded_head, prefill_tuning
from engine.kv_cache import LayerPool

_LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What a launch needs of a step, the same for all its layers; all int32.

    ``spans`` ``[s, 3]``: first row of the step's tokens, number of new tokens, start position.
    ``tables`` ``[s, width]``; ``tiles`` ``[t, 2]``: sequence and first row within it.
    """

    spans: Tensor
    tables: Tensor
    tiles: Tensor

    @classmethod
    def of(
        cls, spans: Sequence[Span], group: int, block_m: int, block_size: int, device: torch.device
    ) -> "PrefillPlan":
        tiles = [
            (index, start)
            for index, span in enumerate(spans)
            for start in range(0, span.num_new * group, block_m)
        ]
        # The longest contexts first: their tiles take the longest.
        tiles.sort(key=lambda tile: -(spans[tile[0]].start + tile[1] // group))
        numbers = [(span.first, span.num_new, span.start) for span in spans]
        return cls(
            torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True),
            block_tables(spans, block_size).to(device, non_blocking=True),
            torch.tensor(tiles, dtype=torch.int32).to(device, non_blocking=True),
        )


def paged_prefill(queries: Tensor, pool: LayerPool, plan: PrefillPlan, output: Tensor) -> None:
    """Attention of all new tokens of the plan's spans into the same rows of ``output``; both
    ``[n, num_heads, head_size]``. Other rows are left alone."""
    _, num_heads, head_size = queries.shape
    tuning = prefill_tuning(head_size, queries.element_size(), queries.device)
    _prefill[(plan.tiles.shape[0], pool.num_kv_heads)](
        queries, pool.keys, output, plan.spans, plan.tables, plan.tiles,
        head_size**-0.5 * _LOG2E,
        *queries.stride()[:2], *pool.keys.stride()[:3], pool.value_offset, plan.tables.stride(0),
        *output.stride()[:2],
        BLOCK_SIZE=pool.block_size, HEAD_SIZE=head_size, GROUP=num_heads // pool.num_kv_heads,
        BLOCK_M=tuning.block_m, BLOCK_D=padded_head(head_size), BLOCK_N=tuning.block_n,
        **options(tuning.num_warps, tuning.num_stages),
    )  # fmt: skip


@triton.jit
def _prefill(
    queries, keys, output, spans, tables, tiles,
    scale_log2,
    q_stride_n, q_stride_h, pool_stride_block, pool_stride_token, pool_stride_head, value_offset,
    table_stride,
    o_stride_n, o_stride_h,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    first_row = tl.load(tiles + 2 * tile + 1)
    first = tl.load(spans + 3 * sequence)
    num_new = tl.load(spans + 3 * sequence + 1)
    start = tl.load(spans + 3 * sequence + 2)

    rows = first_row + tl.arange(0, BLOCK_M)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_SIZE
    used = (tokens < num_new)[:, None] & in_head[None, :]
    token_rows = (first + tokens).to(tl.int64)
    query_at = token_rows[:, None] * q_stride_n + heads[:, None] * q_stride_h + dims[None, :]
    query = tl.load(queries + query_at, mask=used, other=0.0)
    positions = start + tokens

    greatest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    accumulated = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    head_at = kv_head * pool_stride_head + dims
    last_token = tl.minimum(num_new - 1, (first_row + BLOCK_M - 1) // GROUP)
    context = start + last_token + 1
    # Every row of the tile sees at least the positions before `seen_by_all`.
    seen_by_all = (start + first_row // GROUP + 1) // BLOCK_N * BLOCK_N

    for begin in range(0, seen_by_all, BLOCK_N):
        columns = begin + tl.arange(0, BLOCK_N)
        there = columns < context
        key, value = load_tile(
            keys, value_offset, table, columns, there, head_at, in_head, pool_stride_block,
            pool_stride_token, BLOCK_SIZE,
        )  # fmt: skip
        greatest, total, accumulated = attend_tile(
            query, key, value, there[None, :], scale_log2, greatest, total, accumulated, False
        )
    for begin in range(seen_by_all, context, BLOCK_N):
        columns = begin + tl.arange(0, BLOCK_N)
        there = columns < context
        key, value = load_tile(
            keys, value_offset, table, columns, there, head_at, in_head, pool_stride_block,
            pool_stride_token, BLOCK_SIZE,
        )  # fmt: skip
        # Rows past the last token look at everything: what they give is not stored.
        visible = there[None, :] & (columns[None, :] <= positions[:, None])
        greatest, total, accumulated = attend_tile(
            query, key, value, visible, scale_log2, greatest, total, accumulated, True
        )

    output_at = token_rows[:, None] * o_stride_n + heads[:, None] * o_stride_h + dims[None, :]
    attended = accumulated / total[:, None]
    tl.store(output + output_at, attended.to(output.dtype.element_ty), mask=used)
