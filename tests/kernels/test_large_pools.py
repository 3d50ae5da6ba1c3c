"""Pools of more than 2**32 elements: addresses that 32 bits would wrap.

8 GiB of memory that is never touched, so never there, but for the last blocks.
"""

import pytest
import torch
from support.kv_pools import filled_pool, random_queries
from torch import Tensor

from engine.kernels import blocks, rotary_write
from engine.kernels.paged_decode import paged_decode
from engine.kernels.paged_prefill import PrefillPlan, paged_prefill
from engine.kernels.span import Span, block_tables
from engine.kernels.torch_kernels import TorchKernels
from engine.kernels.tuning import prefill_tuning
from engine.kv_cache import KVCache, LayerPool

NUM_LAYERS, BLOCK_SIZE, HEAD_SIZE = 2, 16, 64
BLOCK_ELEMENTS = NUM_LAYERS * 2 * BLOCK_SIZE * HEAD_SIZE
NUM_BLOCKS = 2**32 // BLOCK_ELEMENTS + 8
CONTEXT = 20


@pytest.fixture
def large() -> Tensor:
    shape = (NUM_BLOCKS, NUM_LAYERS, 2, BLOCK_SIZE, 1, HEAD_SIZE)
    return torch.empty(shape, dtype=torch.float16)


def test_attention_reads_the_last_blocks(large: Tensor) -> None:
    small = filled_pool([CONTEXT], 1, HEAD_SIZE, BLOCK_SIZE, torch.float16)
    last = [NUM_BLOCKS - 1, NUM_BLOCKS - 3]
    large[last] = small.storage[small.tables[0]]
    layer = LayerPool.of(large, 1)
    decode = Span(0, 1, CONTEXT - 1, small.tables[0])
    queries = random_queries(1, 2, HEAD_SIZE, torch.float16)
    there = Span(0, 1, CONTEXT - 1, last)
    output = paged_decode(
        queries, layer, block_tables([there], BLOCK_SIZE), torch.tensor([CONTEXT]).int(), 2
    )
    expected = small.expected([decode], queries)
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=2e-3)

    queries = random_queries(CONTEXT, 2, HEAD_SIZE, torch.float16)
    block_m = prefill_tuning(HEAD_SIZE, 2, queries.device).block_m
    chunk = Span(0, CONTEXT, 0, last)
    plan = PrefillPlan.of([chunk], 2, block_m, BLOCK_SIZE, torch.device("cpu"))
    output = torch.empty(queries.shape, dtype=queries.dtype)
    paged_prefill(queries, layer, plan, output)
    expected = small.expected([Span(0, CONTEXT, 0, small.tables[0])], queries)
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=2e-3)


def test_rotary_write_into_the_last_block(large: Tensor) -> None:
    cache = KVCache(large)
    small = KVCache(torch.zeros((2, *large.shape[1:]), dtype=torch.float16))
    heads = torch.randn((1, 3, HEAD_SIZE), generator=torch.Generator().manual_seed(0)).half()
    queries, keys, values = heads.split(1, dim=1)
    angles = (torch.ones(1, 1, HEAD_SIZE).half(), torch.zeros(1, 1, HEAD_SIZE).half())
    slot = torch.tensor(cache.slots([NUM_BLOCKS - 1], 3, 4))
    large[NUM_BLOCKS - 1] = 0
    rotary_write.rotary_write(
        cache.layers[1], slot, cache.rows_per_block, (queries, keys, values), angles
    )
    TorchKernels().rotary_write(
        small, 1, torch.tensor(small.slots([1], 3, 4)), (queries, keys, values), angles
    )
    assert torch.equal(large[NUM_BLOCKS - 1], small.storage[1])


def test_copy_of_the_last_blocks(large: Tensor) -> None:
    size = (2, *large.shape[1:])
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)).half()
    ids = torch.tensor([NUM_BLOCKS - 1, NUM_BLOCKS - 4])
    blocks.copy_blocks(values, torch.arange(2), large, ids)
    assert torch.equal(large[ids], values)
    back = torch.zeros_like(values)
    blocks.copy_blocks(large, ids, back, torch.arange(2))
    assert torch.equal(back, values)
