"""The CPU engine by itself, against what this machine can do. JSON, and three pictures.

``python -m bench.cpu [--quantization none,int8,int4] [--kernels auto] [--plot PREFIX]``

One runner a kind of weights, no network: decode tokens a second against batch (context 128), step
time against context (one sequence, 256 to 4,096 tokens; 1 of 4 sequences long, which the others
must not pay for), a prompt of 512. Beside them the rates of the same run: a sum over 512 MB of fp32
(reads) and a product of two 2048 x 2048 matrices, both by torch with as many threads.

- *read share*: bytes that a step at batch 1 must read, over its time, over the read rate.
- *product share*: FLOPs of a prompt of 512 over its time, over the rate of the product.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import psutil
import torch

from cli.model_cache import default_cache_dir, prepare_entry
from cli.prepare import DEFAULT_MODEL, find_source
from common.types import KVLayout, SamplingParams, SequenceId
from engine.batch import Batch, BatchRow, SampleRequest
from engine.flops import model_costs
from engine.model_runner import RunnerConfig, build_runner
from engine.models.config import ModelEntry, read_entry

BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (256, 512, 1024, 2048, 4096)
CONTEXT, PROMPT, BLOCK_SIZE, NUM_BLOCKS = 128, 512, 16, 600
NUM_THREADS = torch.get_num_threads()
# Bytes a weight, its share of scales included.
ITEMSIZE = {"none": 4.0, "int8": 1.0, "int4": 0.75}
# Least shares of the machine's rates.
READ_SHARES, PRODUCT_SHARE = {"none": 0.8, "int8": 0.5}, 0.7
GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


class Bench:
    """One kind of weights; pools hold noise, which is as good as anything to attend to."""

    def __init__(self, entry: ModelEntry, kernels: str, quantization: str) -> None:
        config = entry.config
        shape = (NUM_BLOCKS, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads)
        self._storage = torch.randn(*shape, config.head_size)
        torch.set_num_threads(NUM_THREADS)
        before = psutil.Process().memory_info().rss
        chosen = RunnerConfig(kernels=kernels, quantization=quantization)
        self._runner = build_runner(chosen, entry.directory, self._storage)
        self.is_compiled = self._runner.kernels_name == "numba"
        self.step_s([BLOCK_SIZE], repeats=1)  # what is mapped is in memory once it was read
        self.weights_mb = (psutil.Process().memory_info().rss - before) >> 20

    def step_s(self, contexts: Sequence[int], num_new: int = 1, repeats: int = 7) -> float:
        """Median time of a step whose rows have ``num_new`` tokens and these contexts in all."""
        rows = [
            BatchRow(
                SequenceId(i),
                [(7 * i + j) % 40_000 for j in range(num_new)],
                context - num_new,
                [1 + (31 * i + j) % (NUM_BLOCKS - 1) for j in range(-(-context // BLOCK_SIZE))],
                SampleRequest(GREEDY, context - num_new, context, []),
            )
            for i, context in enumerate(contexts)
        ]
        times = []
        for _ in range(repeats + 1):
            start_s = time.perf_counter()
            self._runner.launch(Batch(0, rows)).collect()
            times.append(time.perf_counter() - start_s)
        return statistics.median(times[1:])


def machine_rates() -> dict[str, float]:
    """Bytes and FLOPs a second, the best of several."""
    many, square = torch.zeros(1 << 27), torch.randn(2048, 2048)

    def best_s(times: int, work: Any) -> float:
        taken = []
        for _ in range(times):
            start_s = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start_s)
        return min(taken)

    return {
        "read_bytes_per_s": many.nbytes / best_s(6, many.sum),
        "flops_per_s": 2 * 2048**3 / best_s(4, lambda: square @ square),
    }


def measure(entry: ModelEntry, kernels: str, quantization: str) -> dict[str, Any]:
    bench = Bench(entry, kernels, quantization)
    layout = KVLayout(
        num_layers=entry.config.num_layers,
        block_size=BLOCK_SIZE,
        num_kv_heads=entry.config.num_kv_heads,
        head_size=entry.config.head_size,
        dtype="float32",
        model_fingerprint="",
    )
    costs = model_costs(entry.config, ITEMSIZE[quantization], layout)
    torch.set_num_threads(NUM_THREADS)
    rates = machine_rates()
    if bench.is_compiled:
        torch.set_num_threads(1)  # as a worker does
    one_s, prompt_s = bench.step_s([CONTEXT], repeats=15), bench.step_s([PROMPT], PROMPT, 3)
    read = costs.layer_bytes + costs.head_bytes + CONTEXT * costs.kv_bytes
    result = {
        "machine": rates,
        "weights_mb": bench.weights_mb,
        "read_share": read / one_s / rates["read_bytes_per_s"],
        "read_share_at_least": READ_SHARES.get(quantization),
        "prefill_tokens_per_s": PROMPT / prompt_s,
        "product_share": costs.row(0, PROMPT, 1).flops / prompt_s / rates["flops_per_s"],
        "product_share_at_least": PRODUCT_SHARE,
        "decode_tokens_per_s": {
            count: count / bench.step_s([CONTEXT] * count) for count in BATCHES
        },
        "step_ms_by_context": {size: 1000 * bench.step_s([size]) for size in CONTEXTS},
    }
    short_ms, long_ms = 1000 * bench.step_s([CONTEXT]), 1000 * bench.step_s([2048])
    mixed_ms = 1000 * bench.step_s([2048, CONTEXT, CONTEXT, CONTEXT])
    four_ms = 1000 * bench.step_s([CONTEXT] * 4)
    result["long_mate"] = {"extra_ms": mixed_ms - four_ms, "extra_alone_ms": long_ms - short_ms}
    return result


def plot(results: dict[str, Any], kv_bytes: int, prefix: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pictures = {
        "batch": ("sequences a step (context 128)", "decode, tokens/s", "decode_tokens_per_s"),
        "context": ("tokens attended to", "step of one sequence, ms", "step_ms_by_context"),
    }
    for name, (x_label, y_label, field) in pictures.items():
        figure, axes = pyplot.subplots(figsize=(6.4, 4))
        for quantization, result in results.items():
            points = result[field]
            label = "fp32" if quantization == "none" else quantization
            axes.plot(list(points), list(points.values()), marker="o", label=label)
        axes.set(xlabel=x_label, ylabel=y_label, ylim=0)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.tight_layout()
        figure.savefig(f"{prefix}-{name}.png", dpi=140)
    figure, axes = pyplot.subplots(figsize=(6.4, 4))
    for quantization, result in results.items():
        label = "fp32" if quantization == "none" else quantization
        totals = [result["weights_mb"] + n * 1024 * kv_bytes / 2**20 for n in range(0, 65, 8)]
        axes.plot(range(0, 65, 8), totals, marker="o", label=label)
    axes.set(xlabel="sequences of 1,024 tokens", ylabel="weights and KV, MiB", ylim=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(f"{prefix}-memory.png", dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quantization", default="none,int8,int4")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--plot", help="docs/pictures/cpu makes docs/pictures/cpu-batch.png ...")
    given = parser.parse_args()
    directory = prepare_entry(find_source(DEFAULT_MODEL), default_cache_dir(), lambda *_: None)
    entry = read_entry(directory)
    # A process each: what one frees would serve the next, and its weights seem to weigh nothing.
    context = multiprocessing.get_context("spawn")
    results = {}
    for quantization in given.quantization.split(","):
        with ProcessPoolExecutor(1, context) as alone:
            results[quantization] = alone.submit(
                measure, entry, given.kernels, quantization
            ).result()
    print(json.dumps({"threads": NUM_THREADS, **results}, indent=2))
    if given.plot:
        config = entry.config
        kv_bytes = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_size
        plot(results, kv_bytes, given.plot)


if __name__ == "__main__":
    main()
