"""What a step costs beside the model, at 256 decoding sequences of 1,000 tokens. Prints JSON.

``python -m bench.schedule [--sequences N] [--context N] [--steps N]``

The real engine, scheduler, pool with prefix caching, and `TorchRunner` work on a model whose
forward pass does nothing. CPU milliseconds a step, median and 99th percentile:

schedule_ms      `Scheduler.schedule`, growth of block tables included
tensors_ms       the batch, and token ids, positions and cache slots as tensors
postprocess_ms   `Engine` after the results are there: tokens, ends, hashing and indexing of blocks
step_ms          the sum of these three, step by step
attention_ms     block tables and masks for the torch attention kernel; not in the sum
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from common.ready import make_collections_rare, make_collections_short
from common.types import SamplingParams, SequenceId, SequenceSpec
from engine.batch import Batch
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.kernels import Attention
from engine.kernels.span import Span
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_cache import KVCache
from engine.model_runner import FinishedStep, TorchRunner
from engine.plan import Plan
from engine.prefix_cache import PrefixCache
from engine.scheduler import SchedulerConfig

BLOCK_SIZE = 16
VOCAB_SIZE = 1000
WARM_UP = 5
STEP_TOKENS = 8192


@dataclass
class Times:
    """CPU seconds: how long something took in the present step, or when it was."""

    schedule_s: float = 0.0
    attention_s: float = 0.0
    forward_s: float = 0.0
    computed_s: float = 0.0


class TimedKernels(TorchKernels):
    def __init__(self, times: Times) -> None:
        super().__init__()
        self._times = times

    def attention(self, cache: KVCache, spans: Sequence[Span]) -> Attention:
        start_s = time.thread_time()
        attention = super().attention(cache, spans)
        self._times.attention_s = time.thread_time() - start_s
        return attention


@dataclass
class EmptyModel:
    """Hidden states and logits out of nothing; notes when it was asked."""

    times: Times
    kernels: TorchKernels = field(default_factory=TorchKernels)
    config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(vocab_size=VOCAB_SIZE))

    def forward(self, token_ids: torch.Tensor, *_: object) -> torch.Tensor:
        self.times.forward_s = time.thread_time()
        return torch.zeros(len(token_ids), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(hidden), VOCAB_SIZE)
        logits[:, 7] = 1.0
        return logits


class TimedRunner(TorchRunner):
    def __init__(self, times: Times, cache: KVCache) -> None:
        model: Any = EmptyModel(times)
        super().__init__(model, cache)
        self._times = times
        self._kernels = TimedKernels(times)

    def launch(self, batch: Batch) -> FinishedStep:
        step = super().launch(batch)
        self._times.computed_s = time.thread_time()
        return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    samples = measure(options.sequences, options.context, options.steps)
    print(json.dumps({**vars(options), **{name: summary(s) for name, s in samples.items()}}))


def measure(num_sequences: int, context: int, num_steps: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    times = Times()
    # Nobody ends: the first decode already while the last are at their prompts.
    max_tokens = WARM_UP + num_steps + 2 * num_sequences * context // STEP_TOKENS + 10
    engine = make_engine(times, num_sequences, context + max_tokens)
    watch_schedule(engine, times)
    params = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0)
    for number in range(num_sequences):
        prompt = tuple((number * 31 + i) % VOCAB_SIZE for i in range(context))
        engine.add(SequenceSpec(SequenceId(number), "", 1, prompt, (), params))
    while not all(s.num_output for s in engine._sequences.values()):
        engine.step()
    make_collections_rare()  # as a worker does
    make_collections_short()
    samples: dict[str, list[float]] = {}
    for step in range(WARM_UP + num_steps):
        start_s = time.thread_time()
        engine.step()
        end_s = time.thread_time()
        if step < WARM_UP:
            continue
        before_s = times.forward_s - start_s - times.schedule_s - times.attention_s
        parts = {
            "schedule_ms": times.schedule_s,
            "tensors_ms": before_s,
            "postprocess_ms": end_s - times.computed_s,
            "step_ms": times.schedule_s + before_s + end_s - times.computed_s,
            "attention_ms": times.attention_s,
        }
        for name, seconds in parts.items():
            samples.setdefault(name, []).append(seconds * 1000)
    return samples


def make_engine(times: Times, num_sequences: int, max_tokens: int) -> Engine:
    num_blocks = num_sequences * (-(-max_tokens // BLOCK_SIZE) + 1) + 1
    cache = KVCache(torch.zeros(num_blocks, 1, 2, BLOCK_SIZE, 1, 1))
    pool = BlockPool(num_blocks, BLOCK_SIZE, "m", PrefixCache(num_blocks))
    config = SchedulerConfig(
        max_num_batched_tokens=STEP_TOKENS, max_num_seqs=num_sequences, max_model_len=max_tokens
    )
    return Engine(TimedRunner(times, cache), pool, config)


def watch_schedule(engine: Engine, times: Times) -> None:
    schedule = engine._scheduler.schedule

    def timed() -> Plan | None:
        start_s = time.thread_time()
        plan = schedule()
        times.schedule_s = time.thread_time() - start_s
        return plan

    engine._scheduler.schedule = timed  # type: ignore[method-assign]


def summary(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "p50": round(statistics.median(ordered), 4),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 4),
    }


if __name__ == "__main__":
    main()
