"""Every kernel against plain torch on the same device: the largest difference and its bound.

On a GPU all head sizes and dtypes; interpreted, a few small shapes.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from bench.gpu.report import Figure, Machine, Outcome
from common.types import SamplingParams
from engine.batch import SampleRequest
from engine.kernels import Kernels, kernel_set
from engine.kernels.span import Span
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_cache import KVCache
from engine.sampler import sample

# Largest absolute difference from fp32 truth on the same values, which are standard normal.
ATTENTION_BOUND = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Relative to the largest value: one rounding more or less.
SMALL_BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LAYER = 1


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def normal(machine: Machine, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator(machine.device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=machine.device).to(dtype)


def filled_cache(
    machine: Machine,
    dtype: torch.dtype,
    contexts: Sequence[int],
    num_kv_heads: int,
    head_size: int,
    block_size: int,
) -> tuple[KVCache, list[list[int]]]:
    """Blocks in random order; what belongs to nobody is NaN."""
    widths = [-(-context // block_size) for context in contexts]
    free = list(range(1, sum(widths) + 2))
    random.Random(0).shuffle(free)
    tables = [[free.pop() for _ in range(width)] for width in widths]
    shape = (sum(widths) + 2, 2, 2, block_size, num_kv_heads, head_size)
    cache = KVCache(torch.full(shape, float("nan"), dtype=dtype, device=machine.device))
    for table, context in zip(tables, contexts, strict=True):
        slots = torch.tensor(cache.slots(table, 0, context), device=machine.device)
        for layer in range(2):
            keys, values = normal(machine, dtype, 2, context, num_kv_heads, head_size)
            cache.write(layer, slots, keys, values)
    return cache, tables


def attention_error(
    machine: Machine,
    dtype: torch.dtype,
    head_size: int,
    group: int,
    block_size: int,
    rows: Sequence[tuple[int, int]],
) -> float:
    """``rows``: context and new tokens of each."""
    num_kv_heads = 2 if machine.has_gpu else 1
    contexts = [context for context, _ in rows]
    cache, tables = filled_cache(machine, dtype, contexts, num_kv_heads, head_size, block_size)
    spans, first = [], 0
    for (context, num_new), table in zip(rows, tables, strict=True):
        spans.append(Span(first, num_new, context - num_new, table))
        first += num_new
    queries = normal(machine, dtype, first, num_kv_heads * group, head_size)
    output = kernel_set("triton", cache).attention(cache, spans)(LAYER, queries)
    truth_cache = KVCache(cache.storage.float())
    expected = TorchKernels().attention(truth_cache, spans)(LAYER, queries.float())
    return float((output.float() - expected).abs().max())


def check_attention(machine: Machine) -> Outcome:
    """Decodes of ragged contexts (1, one block exactly, one over), and mixed steps of chunks,
    whole prompts and decodes."""
    outcome = Outcome()
    large = machine.has_gpu
    decodes = [(1, 1), (16, 1), (17, 1), *([(1000, 1), (4097, 1)] if large else [(40, 1)])]
    mixed = [(1, 1), (33, 33), (50, 7), *([(2000, 2000), (3000, 130)] if large else [])]
    sizes = (64, 80, 96, 128, 256) if large else (64, 80)
    groups = {64: 1, 80: 3, 96: 4, 128: 8, 256: 16}
    blocks = {64: 16, 80: 32, 96: 64, 128: 16, 256: 16}
    for dtype in machine.dtypes:
        for size in sizes:
            for name, rows in (("decode", decodes), ("mixed", mixed)):
                error = attention_error(machine, dtype, size, groups[size], blocks[size], rows)
                label = f"{name} {short(dtype)} head {size}: largest difference"
                outcome.figures.append(Figure(label, error, "1", ATTENTION_BOUND[dtype]))
    return outcome


def check_small_kernels(machine: Machine) -> Outcome:
    """Rotary + write, norms, activation; the pool's other blocks must stay as they are."""
    outcome = Outcome()
    for dtype in machine.dtypes:
        for name, error in _small_errors(machine, dtype).items():
            label = f"{name} {short(dtype)}: largest difference, relative"
            outcome.figures.append(Figure(label, error, "1", SMALL_BOUND[dtype]))
    return outcome


def _small_errors(machine: Machine, dtype: torch.dtype) -> dict[str, float]:
    cache, tables = filled_cache(machine, dtype, [20], 2, 128, 16)
    ours, truth = kernel_set("triton", cache), TorchKernels()
    size = 4096 if machine.has_gpu else 576
    x, residual = normal(machine, dtype, 2, 5, size)
    weight = normal(machine, dtype, size)
    heads = normal(machine, dtype, 6, 12, 128)
    parts = heads.split([8, 2, 2], dim=1)
    half = normal(machine, torch.float32, 6, 1, 64).repeat(1, 1, 2)
    angles = (half.cos().to(dtype), half.sin().to(dtype))
    slots = torch.tensor(cache.slots(tables[0], 12, 18), device=machine.device)
    other = KVCache(cache.storage.clone())

    def rotated(kernels: Kernels, pool: KVCache) -> Tensor:
        return kernels.rotary_write(pool, LAYER, slots, (parts[0], parts[1], parts[2]), angles)

    pairs = {
        "rotary": (rotated(ours, cache), rotated(truth, other)),
        "write": (cache.storage.nan_to_num(0.0), other.storage.nan_to_num(0.0)),
        "add + norm": (
            ours.add_norm(residual, x, weight, 1e-5)[1],
            truth.add_norm(residual, x, weight, 1e-5)[1],
        ),
        "norm by head": (
            ours.norm(parts[0], weight[:128], 1e-5),
            truth.norm(parts[0], weight[:128], 1e-5),
        ),
        "silu x multiply": (ours.silu_multiply(x), truth.silu_multiply(x)),
    }
    return {
        name: float((a.float() - b.float()).abs().max() / b.float().abs().max())
        for name, (a, b) in pairs.items()
    }


def check_block_copies(machine: Machine) -> Outcome:
    """Gather and scatter, bit by bit."""
    pool = normal(machine, torch.float16, 40, 2, 2, 16, 2, 64)
    kernels = kernel_set("triton", KVCache(pool))
    ids = torch.tensor([7, 2, 39, 5], device=machine.device)
    order = torch.arange(len(ids), device=machine.device)
    gathered, scattered = torch.zeros_like(pool[: len(ids)]), torch.zeros_like(pool)
    kernels.copy_blocks(pool, ids, gathered, order)
    kernels.copy_blocks(gathered, order, scattered, ids)
    num_wrong = int((gathered != pool[ids]).sum() + (scattered[ids] != pool[ids]).sum())
    return Outcome([Figure("values that differ after gather and scatter", num_wrong, "1", 0)])


def check_sampling(machine: Machine) -> Outcome:
    """Ids of the device against those of the host, over greedy, seeds, top-k, top-p, min-p."""
    vocab_size, num_rows = (128256, 64) if machine.has_gpu else (1500, 8)
    logits = normal(machine, torch.float32, num_rows, vocab_size) * 3
    requests = [
        SampleRequest(
            SamplingParams(
                max_tokens=1,
                seed=2**64 - 1 - i,
                temperature=0.0 if i % 4 == 0 else 0.5 + i / num_rows,
                top_k=(0, 40)[i % 2],
                top_p=(1.0, 0.9)[i // 2 % 2],
                min_p=(0.0, 0.01)[i // 4 % 2],
            ),
            1,
            1 + (i << 31),
            [],
        )
        for i in range(num_rows)
    ]
    cache = KVCache(normal(machine, torch.float16, 2, 1, 2, 16, 1, 64))
    ours = kernel_set("triton", cache).sample(logits, requests).collect()
    truth = sample(logits, requests)
    wrong = sum(a != b for a, b in zip(ours, truth, strict=True))
    # A sum of two floats may round the other way where two ids are all but equal.
    return Outcome([Figure("rows with another id than the host's", wrong, "1", num_rows // 50)])


def check_large_pool(machine: Machine) -> Outcome:
    """A pool of more than 2**32 elements, of which only the last blocks are touched."""
    block_elements = 2 * 2 * 16 * 64
    num_blocks = 2**32 // block_elements + 8
    small, tables = filled_cache(machine, torch.float16, [20], 1, 64, 16)
    shape = (num_blocks, *small.storage.shape[1:])
    large = KVCache(torch.empty(shape, dtype=torch.float16, device=machine.device))
    last = [num_blocks - 1, num_blocks - 5]
    for source, target in zip(tables[0], last, strict=True):
        large.storage[target] = small.storage[source]
    kernels = kernel_set("triton", large)
    errors = []
    for num_new in (1, 20):
        queries = normal(machine, torch.float16, num_new, 2, 64)
        there = Span(0, num_new, 20 - num_new, last)
        here = Span(0, num_new, 20 - num_new, tables[0])
        output = kernels.attention(large, [there])(LAYER, queries)
        expected = TorchKernels().attention(small, [here])(LAYER, queries)
        errors.append(float((output.float() - expected.float()).abs().max()))
    bound = ATTENTION_BOUND[torch.float16]
    return Outcome([Figure("attention of the last blocks: difference", max(errors), "1", bound)])
