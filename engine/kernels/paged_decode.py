"""Paged decode attention: one query token a sequence, its context read through a block table.

Decode reads every key and value once and computes little, so memory bandwidth is all that counts:

1. The context of a row is split over ``num_splits`` programs, so that few rows fill a GPU too
   (Flash-Decoding, Dao et al. 2023). Each gives softmax-weighted values and a log-sum-exp.
2. The query heads that share a KV head are the rows of one tile, at least 16 for the tensor cores:
   a key is loaded once for all of them.
3. A second kernel weighs the splits of a head by their log-sum-exp (`reduce_splits`).

An empty row (context 0) or split yields zeros and a log-sum-exp of -1e30, never a NaN. What lies
behind a context is not loaded. ::

    split        0                   1                   2
    tokens  [0 .. per_split-1]  [per_split .. ]      [ .. context-1]
    tiles   |BLOCK_N|BLOCK_N|   |BLOCK_N|BLOCK_N|    |BLOCK_N|
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.flash import attend_tile, load_tile
from engine.kernels.tuning import DECODE_MAX_SPLITS, decode_tuning, options, padded_head
from engine.kv_cache import LayerPool

EMPTY_LSE = -1e30
_LOG2E = 1.4426950408889634
_MIN_DOT_ROWS = 16


def paged_decode(
    queries: Tensor,
    pool: LayerPool,
    tables: Tensor,
    contexts: Tensor,
    num_splits: int,
    rows: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """Attention ``[m, num_heads, head_size]`` of m sequences' last tokens.

    ``queries`` ``[n, num_heads, head_size]``, of which sequence i takes ``rows[i]`` (i without
    ``rows``); ``tables`` int32 ``[m, width]``, ``contexts`` int32 ``[m]``, which count the query's
    own token. Writes to the same rows of ``output``, or of a new tensor.
    """
    num_sequences = tables.shape[0]
    _, num_heads, head_size = queries.shape
    output = torch.empty_like(queries) if output is None else output
    if num_sequences == 0:
        return output
    if num_splits == 1:
        partials = output[None]
        sums = queries.new_empty((1, queries.shape[0], num_heads), dtype=torch.float32)
    else:
        shape = (num_splits, queries.shape[0], num_heads)
        partials = queries.new_empty((*shape, head_size), dtype=torch.float32)
        sums = queries.new_empty(shape, dtype=torch.float32)
    launch_splits(queries, pool, tables, contexts, partials, sums, rows)
    if num_splits > 1:
        _reduce_splits[(num_sequences, num_heads)](
            partials, sums, output, rows, *partials.stride()[:3], *sums.stride()[:2],
            *output.stride()[:2],
            HAS_ROWS=rows is not None, NUM_SPLITS=num_splits, HEAD_SIZE=head_size,
            BLOCK_S=triton.next_power_of_2(num_splits), BLOCK_D=padded_head(head_size),
            **options(1),
        )  # fmt: skip
    return output


def launch_splits(
    queries: Tensor,
    pool: LayerPool,
    tables: Tensor,
    contexts: Tensor,
    partials: Tensor,
    sums: Tensor,
    rows: Tensor | None = None,
) -> None:
    """Fills ``partials`` ``[num_splits, n, num_heads, head_size]`` and ``sums`` (log-sum-exps,
    natural, fp32) ``[num_splits, n, num_heads]``."""
    _, num_heads, head_size = queries.shape
    group = num_heads // pool.num_kv_heads
    tuning = decode_tuning(head_size, queries.element_size())
    _decode_split[(tables.shape[0], pool.num_kv_heads, partials.shape[0])](
        queries, pool.keys, tables, contexts, partials, sums, rows,
        head_size**-0.5 * _LOG2E,
        *queries.stride()[:2], *pool.keys.stride()[:3], pool.value_offset, tables.stride(0),
        *partials.stride()[:3], *sums.stride()[:2],
        HAS_ROWS=rows is not None, NUM_SPLITS=partials.shape[0], BLOCK_SIZE=pool.block_size,
        HEAD_SIZE=head_size, GROUP=group,
        BLOCK_G=max(_MIN_DOT_ROWS, triton.next_power_of_2(group)),
        BLOCK_D=padded_head(head_size), BLOCK_N=tuning.block_n,
        **options(tuning.num_warps, tuning.num_stages),
    )  # fmt: skip


def num_decode_splits(num_sequences: int, num_kv_heads: int, num_processors: int) -> int:
    """Enough programs to fill ``num_processors`` twice. Never a function of the contexts: a
    captured graph is replayed at any."""
    wanted = -(-2 * num_processors // max(1, num_sequences * num_kv_heads))
    return min(DECODE_MAX_SPLITS, 1 << (wanted - 1).bit_length())


@triton.jit
def _decode_split(
    queries, keys, tables, contexts, partials, sums, rows,
    scale_log2,
    q_stride_n, q_stride_h, pool_stride_block, pool_stride_token, pool_stride_head, value_offset,
    table_stride,
    p_stride_s, p_stride_n, p_stride_h, s_stride_s, s_stride_n,
    HAS_ROWS: tl.constexpr, NUM_SPLITS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = sequence.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows + sequence).to(tl.int64)
    context = tl.load(contexts + sequence)
    per_split = tl.cdiv(tl.cdiv(context, BLOCK_N), NUM_SPLITS) * BLOCK_N
    begin = split * per_split
    end = tl.minimum(context, begin + per_split)

    group = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_SIZE
    heads = kv_head * GROUP + group
    used = (group < GROUP)[:, None] & in_head[None, :]
    query_at = row * q_stride_n + heads[:, None] * q_stride_h + dims[None, :]
    query = tl.load(queries + query_at, mask=used, other=0.0)

    greatest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    accumulated = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    head_at = kv_head * pool_stride_head + dims
    for first in range(begin, end, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N)
        there = tokens < end
        key, value = load_tile(
            keys, value_offset, table, tokens, there, head_at, in_head, pool_stride_block,
            pool_stride_token, BLOCK_SIZE,
        )  # fmt: skip
        greatest, total, accumulated = attend_tile(
            query, key, value, there[None, :], scale_log2, greatest, total, accumulated, True
        )

    some = end > begin
    divisor = tl.where(some, total, 1.0)
    # log-sum-exp in nats: the scores were scaled by log2(e).
    lse = tl.where(some, (greatest + tl.log2(divisor)) * 0.6931471805599453, -1e30)
    partial_at = split.to(tl.int64) * p_stride_s + row * p_stride_n
    tl.store(
        partials + partial_at + heads[:, None] * p_stride_h + dims[None, :],
        (accumulated / divisor[:, None]).to(partials.dtype.element_ty),
        mask=used,
    )
    sum_at = split.to(tl.int64) * s_stride_s + row * s_stride_n + heads
    tl.store(sums + sum_at, lse, mask=group < GROUP)


@triton.jit
def _reduce_splits(
    partials, sums, output, rows,
    p_stride_s, p_stride_n, p_stride_h, s_stride_s, s_stride_n, o_stride_n, o_stride_h,
    HAS_ROWS: tl.constexpr, NUM_SPLITS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if HAS_ROWS:
        row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    splits = tl.arange(0, BLOCK_S).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    there = splits < NUM_SPLITS
    in_head = dims < HEAD_SIZE
    lse = tl.load(sums + splits * s_stride_s + row * s_stride_n + head, mask=there, other=-1e30)
    partial_at = splits[:, None] * p_stride_s + row * p_stride_n + head * p_stride_h
    values = tl.load(
        partials + partial_at + dims[None, :], mask=there[:, None] & in_head[None, :], other=0.0
    )
    weights = tl.exp(lse - tl.max(lse, 0))
    mean = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(
        output + row * o_stride_n + head * o_stride_h + dims,
        mean.to(output.dtype.element_ty),
        mask=in_head,
    )
