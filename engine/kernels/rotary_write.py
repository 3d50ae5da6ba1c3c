"""Rotary embedding fused with the write into the pool: one launch a layer, nothing in between.

A program takes one token and one tile of heads: queries (rotated into the output), or keys (rotated
into the token's slot) and values beside them. Tokens with slot -1, the padding of a captured batch,
are written nowhere.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.tuning import options
from engine.kv_cache import LayerPool

_MAX_HEADS = 32


def rotary_write(
    pool: LayerPool,
    slots: Tensor,
    rows_per_block: int,
    heads: tuple[Tensor, Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
) -> Tensor:
    """Rotated queries ``[n, num_heads, head_size]``. A slot is ``block * rows_per_block + offset``
    (engine/kv_cache.py), int64 ``[n]``; shapes are those of `engine.kernels.Kernels`."""
    queries, keys, values = heads
    cosines, sines = angles
    num_tokens, num_heads, head_size = queries.shape
    output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    if num_tokens == 0:
        return output
    block_h = min(_MAX_HEADS, triton.next_power_of_2(num_heads))
    query_tiles, key_tiles = triton.cdiv(num_heads, block_h), triton.cdiv(keys.shape[1], block_h)
    _rotary_write[(num_tokens, query_tiles + key_tiles)](
        queries, keys, values, cosines, sines, output, pool.keys, slots, rows_per_block,
        *queries.stride()[:2], *keys.stride()[:2], *values.stride()[:2], cosines.stride(0),
        *output.stride()[:2], *pool.keys.stride()[:3], pool.value_offset, query_tiles,
        NUM_HEADS=num_heads, NUM_KV_HEADS=keys.shape[1], HALF=head_size // 2, BLOCK_H=block_h,
        BLOCK_HALF=triton.next_power_of_2(head_size // 2), **options(4 if block_h > 8 else 1),
    )  # fmt: skip
    return output


@triton.jit
def _rotary_write(
    queries, keys, values, cosines, sines, output, pool, slots, rows_per_block,
    q_stride_n, q_stride_h, k_stride_n, k_stride_h, v_stride_n, v_stride_h, angle_stride,
    o_stride_n, o_stride_h,
    pool_stride_block, pool_stride_token, pool_stride_head, value_offset, query_tiles,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    dims = tl.arange(0, BLOCK_HALF)
    in_half = dims < HALF
    # Both halves of an angle are the same.
    cosine = tl.load(cosines + token * angle_stride + dims, mask=in_half, other=0.0).to(tl.float32)
    sine = tl.load(sines + token * angle_stride + dims, mask=in_half, other=0.0).to(tl.float32)
    if tile < query_tiles:
        heads = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        used = (heads < NUM_HEADS)[:, None] & in_half[None, :]
        source = queries + token * q_stride_n + heads[:, None] * q_stride_h + dims[None, :]
        target = output + token * o_stride_n + heads[:, None] * o_stride_h + dims[None, :]
        _rotate_tile(source, target, cosine, sine, used, HALF)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        heads = (tile - query_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
        num_heads = tl.where(slot >= 0, NUM_KV_HEADS, 0)
        used = (heads < num_heads)[:, None] & in_half[None, :]
        block_at = slot // rows_per_block * pool_stride_block
        slot_at = block_at + slot % rows_per_block * pool_stride_token
        source = keys + token * k_stride_n + heads[:, None] * k_stride_h + dims[None, :]
        target = pool + slot_at + heads[:, None] * pool_stride_head + dims[None, :]
        _rotate_tile(source, target, cosine, sine, used, HALF)
        source = values + token * v_stride_n + heads[:, None] * v_stride_h + dims[None, :]
        target += value_offset
        tl.store(target, tl.load(source, mask=used), mask=used)
        tl.store(target + HALF, tl.load(source + HALF, mask=used), mask=used)


@triton.jit
def _rotate_tile(source, target, cosine, sine, used, HALF: tl.constexpr):
    """Halves of a head are paired: (x, y) to (x cos - y sin, y cos + x sin)."""
    x = tl.load(source, mask=used, other=0.0).to(tl.float32)
    y = tl.load(source + HALF, mask=used, other=0.0).to(tl.float32)
    rotated_x = x * cosine[None, :] - y * sine[None, :]
    rotated_y = y * cosine[None, :] + x * sine[None, :]
    tl.store(target, rotated_x.to(target.dtype.element_ty), mask=used)
    tl.store(target + HALF, rotated_y.to(target.dtype.element_ty), mask=used)
