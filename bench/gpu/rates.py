"""Speed as shares of what the device itself reaches: its copy rate and its matmul rate."""

import random

import torch

from bench.gpu.report import Figure, Machine, NotRun, Outcome
from bench.gpu.timing import first_call_s, median_s, profile
from engine.kernels import kernel_set
from engine.kernels.span import Span
from engine.kv_cache import KVCache

COPY, MATMUL = "copy_bytes_per_s", "matmul_flops_per_s"
_COPY_BYTES = 2 << 30
_MATMUL_SIZE = 8192
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16


def check_device_rates(machine: Machine) -> Outcome:
    copy = machine.rates[COPY] = _copy_rate(machine)
    matmul = machine.rates[MATMUL] = _matmul_rate(machine)
    return Outcome(
        [
            Figure("copy, 2 x bytes / time of 2 GiB", copy / 1e9, "GB/s"),
            Figure("matmul, bf16 8192^3", matmul / 1e12, "TFLOP/s"),
        ]
    )


def _copy_rate(machine: Machine) -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.int8, device=machine.device)
    target = torch.empty_like(source)
    seconds = median_s(lambda: target.copy_(source), repeats=10, sweeps=False)
    return 2 * _COPY_BYTES / seconds


def _matmul_rate(machine: Machine) -> float:
    shape = (_MATMUL_SIZE, _MATMUL_SIZE)
    a, b = (torch.randn(shape, device=machine.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * _MATMUL_SIZE**3 / median_s(lambda: a @ b, repeats=10)


def rate(machine: Machine, name: str) -> float:
    """Raises NotRun where it was not measured."""
    if name not in machine.rates:
        raise NotRun(f"{name} was not measured")
    return machine.rates[name]


def check_decode_attention(machine: Machine) -> Outcome:
    """Batch 64, 4,096 tokens, 32 / 8 heads of 128, blocks of 16, bf16."""
    copy, batch, context = rate(machine, COPY), 64, 4096
    cache, tables = _shuffled_cache(machine, batch, context)
    spans = [Span(i, 1, context - 1, table) for i, table in enumerate(tables)]
    attention = kernel_set("triton", cache).attention(cache, spans)
    queries = torch.randn(
        (batch, NUM_HEADS, HEAD_SIZE), device=machine.device, dtype=torch.bfloat16
    )
    compile_s = first_call_s(lambda: attention(0, queries))
    seconds = median_s(lambda: attention(0, queries))
    num_bytes = batch * context * NUM_KV_HEADS * HEAD_SIZE * 2 * 2
    figure = Figure(
        "KV bytes / time, share of copy", num_bytes / seconds / copy, "1", 0.75, 0.85, False
    )
    missed = profile(lambda: attention(0, queries)) if figure.misses_aim else []
    return Outcome([figure], compile_s, missed)


def check_prefill_attention(machine: Machine) -> Outcome:
    """8,192 tokens, causal, every key through the block table; the same heads."""
    matmul, num_tokens = rate(machine, MATMUL), 8192
    cache, tables = _shuffled_cache(machine, 1, num_tokens)
    attention = kernel_set("triton", cache).attention(cache, [Span(0, num_tokens, 0, tables[0])])
    shape = (num_tokens, NUM_HEADS, HEAD_SIZE)
    queries = torch.randn(shape, device=machine.device, dtype=torch.bfloat16)
    compile_s = first_call_s(lambda: attention(0, queries))
    seconds = median_s(lambda: attention(0, queries), repeats=10)
    # Two products, of which the causal mask leaves half.
    flops = 2 * 2 * NUM_HEADS * HEAD_SIZE * num_tokens**2 / 2
    figure = Figure("share of the matmul rate", flops / seconds / matmul, "1", 0.35, 0.5, False)
    missed = profile(lambda: attention(0, queries)) if figure.misses_aim else []
    return Outcome([figure], compile_s, missed)


def _shuffled_cache(machine: Machine, batch: int, context: int) -> tuple[KVCache, list[list[int]]]:
    """One layer; blocks in random order, as they are after a while."""
    width = -(-context // BLOCK_SIZE)
    ids = list(range(1, batch * width + 1))
    random.Random(0).shuffle(ids)
    shape = (len(ids) + 1, 1, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    storage = torch.empty(shape, dtype=torch.bfloat16, device=machine.device).normal_()
    return KVCache(storage), [ids[i * width : (i + 1) * width] for i in range(batch)]
