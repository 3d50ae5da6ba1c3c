"""Rotary write, norms, activation, block copies, interpreted, against plain torch."""

import pytest
import torch
from support.kv_pools import LAYER, NUM_LAYERS, filled_pool
from torch import Tensor

from engine.kernels import activation, blocks, norm, rotary_write
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_cache import KVCache, LayerPool

TRUTH = TorchKernels()
DTYPES = [torch.float32, torch.float16]
# Rounding of intermediates: plain torch rounds each, a kernel only what it stores.
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 2e-6}, torch.float16: {"rtol": 4e-3, "atol": 4e-3}}
EPS = 1e-5


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 576, 1000, 4096])
def test_add_norm(size: int, dtype: torch.dtype) -> None:
    residual, x, weight = normal(3, 3, size, dtype=dtype)
    total, normed = norm.add_rms_norm(residual, x, weight[0], EPS)
    expected_total, expected = TRUTH.add_norm(residual, x, weight[0], EPS)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [64, 80, 256])
def test_norm_by_head_of_a_strided_view(head_size: int, dtype: torch.dtype) -> None:
    heads = normal(5, 12, head_size, dtype=dtype)[:, 2:9]
    weight = normal(head_size, dtype=dtype, seed=1)
    normed = norm.rms_norm(heads, weight, EPS)
    torch.testing.assert_close(normed, TRUTH.norm(heads, weight, EPS), **CLOSE[dtype])


def test_nothing_of_no_rows() -> None:
    empty = torch.empty(0, 64)
    assert norm.rms_norm(empty, torch.ones(64), EPS).shape == (0, 64)
    assert activation.silu_multiply(empty).shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 96, 1024, 1500])
def test_silu_multiply(size: int, dtype: torch.dtype) -> None:
    gate_up = normal(3, 2 * size + 16, dtype=dtype)[:, : 2 * size] * 4
    torch.testing.assert_close(
        activation.silu_multiply(gate_up), TRUTH.silu_multiply(gate_up), **CLOSE[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "block_size"),
    [(4, 1, 64, 16), (6, 2, 80, 32), (16, 1, 96, 16), (2, 2, 128, 64), (34, 2, 256, 16)],
)
@pytest.mark.parametrize("strided", [False, True])
def test_rotary_write(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    strided: bool,
    dtype: torch.dtype,
) -> None:
    """From strided views, over a block's edge; a token with slot -1 is written nowhere."""
    pool = filled_pool([block_size + 3], num_kv_heads, head_size, block_size, dtype, strided)
    contiguous = pool.storage.clone(memory_format=torch.contiguous_format)
    cache = KVCache(contiguous)
    slots = torch.tensor(cache.slots(pool.tables[0], block_size - 2, block_size + 2))
    heads = normal(5, num_heads + 2 * num_kv_heads, head_size, dtype=dtype)
    parts = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    angles = normal(5, 1, head_size // 2, dtype=torch.float32, seed=2).repeat(1, 1, 2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)

    first = [part[:4] for part in parts]
    expected = TRUTH.rotary_write(
        cache, LAYER, slots, (first[0], first[1], first[2]), (cosines[:4], sines[:4])
    )
    rotated = rotary_write.rotary_write(
        LayerPool.of(pool.storage, LAYER),
        torch.cat((slots, torch.tensor([-1]))),
        2 * NUM_LAYERS * block_size,
        (parts[0], parts[1], parts[2]),
        (cosines, sines),
    )
    torch.testing.assert_close(rotated[:4], expected, **CLOSE[dtype])
    torch.testing.assert_close(pool.storage, contiguous, equal_nan=True, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_copy_blocks(dtype: torch.dtype) -> None:
    """A gather, a scatter into a strided pool, and a copy from block to block within one."""
    pool = normal(9, NUM_LAYERS, 2, 16, 1, 80, dtype=dtype)
    ids, order = torch.tensor([7, 2, 5]), torch.arange(3)
    gathered = torch.zeros((3, *pool.shape[1:]), dtype=dtype)
    blocks.copy_blocks(pool, ids, gathered, order)
    assert torch.equal(gathered, pool[ids])

    wide = torch.zeros((9, 2 * pool[0].numel()), dtype=dtype)
    scattered = wide[:, : pool[0].numel()].view(pool.shape)
    blocks.copy_blocks(gathered, order, scattered, ids.flip(0))
    assert torch.equal(scattered[ids.flip(0)], gathered)
    assert wide[:, pool[0].numel() :].count_nonzero() == 0
    assert scattered[[0, 1, 3, 4, 6, 8]].count_nonzero() == 0

    before = pool.clone()
    blocks.copy_blocks(pool, torch.tensor([1, 4]), pool, torch.tensor([3, 8]))
    before[[3, 8]] = before[[1, 4]]
    assert torch.equal(pool, before)
    blocks.copy_blocks(pool, order[:0], pool, order[:0])
