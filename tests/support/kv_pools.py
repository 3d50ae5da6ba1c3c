"""KV pools for kernel tests: NaN but for what sequences wrote, contiguous or strided."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.span import Span
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_cache import KVCache, LayerPool

NUM_LAYERS = 2
LAYER = 1
# Largest absolute difference from fp32 truth on the same values, which are standard normal.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass
class Pool:
    """``storage`` is what kernels see, ``truth`` the same values in fp32 for plain torch."""

    storage: Tensor
    truth: KVCache
    tables: list[list[int]]
    contexts: list[int]

    @property
    def layer(self) -> LayerPool:
        return LayerPool.of(self.storage, LAYER)

    def expected(self, spans: list[Span], queries: Tensor) -> Tensor:
        """fp32 ``[n, num_heads, head_size]``."""
        attention = TorchKernels().attention(self.truth, spans)
        return attention(LAYER, queries.float()).view(queries.shape)


def filled_pool(
    contexts: list[int],
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: torch.dtype,
    strided: bool = False,
    seed: int = 0,
) -> Pool:
    """Blocks in random order. ``strided``: a view with gaps on every axis but the last."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    widths = [-(-context // block_size) for context in contexts]
    free = list(range(1, sum(widths) + 3))
    rng.shuffle(free)
    tables = [[free.pop() for _ in range(width)] for width in widths]
    shape = (sum(widths) + 3, NUM_LAYERS, 2, block_size, num_kv_heads, head_size)
    truth = KVCache(torch.full(shape, float("nan")))
    for table, context in zip(tables, contexts, strict=True):
        slots = torch.tensor(truth.slots(table, 0, context), dtype=torch.int64)
        for layer in range(NUM_LAYERS):
            size = (2, context, num_kv_heads, head_size)
            keys, values = torch.randn(size, generator=generator).to(dtype).float()
            truth.write(layer, slots, keys, values)
    storage = truth.storage.to(dtype)
    if strided:
        blocks, layers, two, tokens, heads, dims = shape
        gaps = (blocks, layers + 1, two + 1, tokens + 2, heads + 1, dims + 16)
        wide = torch.full(gaps, float("nan"), dtype=dtype)
        view = wide[:, :layers, :two, :tokens, :heads, :dims]
        view.copy_(storage)
        storage = view
    return Pool(storage, truth, tables, contexts)


def random_queries(num_tokens: int, num_heads: int, head_size: int, dtype: torch.dtype) -> Tensor:
    """A view like that of a split qkv product: rows are strided."""
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (num_tokens, num_heads + 2, head_size)
    return torch.randn(shape, generator=generator).to(dtype)[:, :num_heads]
