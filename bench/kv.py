"""What the KV bookkeeping costs, and what the prefix cache gives and takes. JSON.

``python -m bench.kv [--pairs 24] [--prompts 8]``

- *pool*: allocating, freeing, appending, hashing and evicting blocks, at 100,000 blocks.
- *warm prefix*: SmolLM2 behind `baton up` (one prefill, one decode worker); prompts whose first
  1,024 tokens were served before take turns with prompts that share nothing; time to first token.
- *never hit*: two engines over SmolLM2 in this process, with and without a prefix cache, take turns
  on prompts that share nothing. The cost is the time inside the pool with it less that without it,
  over the time of the steps; CPU seconds a token stand beside it.
"""

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench.bounds import at_most, pair_interval
from cli.bench.load import run_closed
from cli.bench.report import rounded
from cli.bench.setup import baton
from cli.bench.workloads import Session, Turn, tokens
from cli.models import prepared
from common.block_keys import block_key, pack_ids
from common.types import KVLayout, SamplingParams, SequenceId, SequenceSpec, TokenId
from engine.block_pool import BlockPool, Holding, RefKind
from engine.engine import Engine
from engine.kernels import kernel_set
from engine.kv_cache import KVCache
from engine.model_runner import TorchRunner
from engine.models.config import read_entry
from engine.models.llama import load_model
from engine.prefix_cache import NO_PARENT, PrefixCache, TokenChain
from engine.scheduler import SchedulerConfig

T = TypeVar("T")

NUM_BLOCKS, BLOCK_SIZE, TABLE = 100_000, 16, 64
# The best counts: all else is other programs.
TRIES = 4
PREFIX, TAIL = 1024, 16
# Of the never-hit engines: sequences at once, their prompts and outputs.
BATCH, PROMPT, OUTPUT = 4, 64, 16
SEED = 5


# ---------------------------------------------------------------- the pool's books


def bench_pool() -> dict[str, Any]:
    allocate_free = min(_time_allocate_free() for _ in range(TRIES))
    small, large = (
        min(_time_eviction(num_blocks) for _ in range(TRIES))
        for num_blocks in (NUM_BLOCKS // 10, NUM_BLOCKS)
    )
    return {
        "allocate_and_free": at_most(allocate_free, 2.0, "us a block"),
        "append": at_most(min(_time_append() for _ in range(TRIES)), 2.0, "us a block"),
        "hash": at_most(min(_time_hash() for _ in range(TRIES)), 5.0, "us a block of 16 tokens"),
        "evict": {"value": large, "unit": "us a block"},
        # Amortised O(1): ten times the blocks, the same cost for each.
        "evict_at_10x_blocks": at_most(large / small, 2.0, "x that of a tenth of the blocks"),
        "bookkeeping": at_most(_bytes_a_block(), 600.0, "bytes a block"),
    }


def _us(start_s: float, num: int) -> float:
    return (time.perf_counter() - start_s) / num * 1e6


def _pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks + 1, BLOCK_SIZE, "bench", PrefixCache(num_blocks + 1))


def _time_allocate_free() -> float:
    pool = _pool(NUM_BLOCKS)
    start_s = time.perf_counter()
    holdings = _allocate_all(pool, NUM_BLOCKS)
    for holding in holdings:
        pool.release(holding)
    return _us(start_s, NUM_BLOCKS)


def _allocate_all(pool: BlockPool, num_blocks: int) -> list[Holding]:
    holdings = [pool.hold(RefKind.SEQUENCE, i) for i in range(num_blocks // TABLE)]
    for holding in holdings:
        pool.allocate(holding, TABLE)
    return holdings


def _time_append() -> float:
    """A block at a time, as 256 running sequences grow."""
    pool = _pool(NUM_BLOCKS)
    holdings = [pool.hold(RefKind.SEQUENCE, i) for i in range(256)]
    rounds = NUM_BLOCKS // len(holdings)
    start_s = time.perf_counter()
    for _ in range(rounds):
        for holding in holdings:
            pool.allocate(holding, 1)
    return _us(start_s, rounds * len(holdings))


def _time_hash() -> float:
    ids = tokens(random.Random(SEED), NUM_BLOCKS // 10 * BLOCK_SIZE)
    key = bytes(32)
    start_s = time.perf_counter()
    for first in range(0, len(ids), BLOCK_SIZE):
        key = block_key(key, pack_ids(ids[first : first + BLOCK_SIZE]))
    return _us(start_s, len(ids) // BLOCK_SIZE)


def _fill_cache(pool: BlockPool, num_blocks: int) -> None:
    """Every block indexed, and none referred to."""
    generator = random.Random(SEED)
    for number in range(num_blocks // TABLE):
        holding = pool.hold(RefKind.SEQUENCE, number)
        blocks = pool.allocate(holding, TABLE)
        chain = pool.chain("", "")
        assert blocks is not None and chain is not None
        ids, parent = tokens(generator, TABLE * BLOCK_SIZE), NO_PARENT
        for index, block in enumerate(blocks):
            parent = pool.index(block, parent, chain, index, ids)
        pool.release(holding)


def _time_eviction(num_blocks: int) -> float:
    """Allocation where every block must be taken from the cache."""
    pool = _pool(num_blocks)
    _fill_cache(pool, num_blocks)
    start_s = time.perf_counter()
    _allocate_all(pool, num_blocks)
    return _us(start_s, num_blocks)


def _bytes_a_block() -> float:
    """With every block indexed and cached, the chains of their sequences being gone."""
    gc.collect()
    tracemalloc.start()
    pool = _pool(NUM_BLOCKS)
    _fill_cache(pool, NUM_BLOCKS)
    gc.collect()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pool.counts().total == NUM_BLOCKS
    return num_bytes / NUM_BLOCKS


# ---------------------------------------------------------------- a warm prefix


async def bench_warm_prefix(num_prompts: int, model: str) -> dict[str, Any]:
    generator = random.Random(SEED)
    prefix = tokens(generator, PREFIX)

    def session(start: Sequence[TokenId]) -> Session:
        return Session((Turn((*start, *tokens(generator, TAIL)), 2),))

    # The first only fills the cache.
    sessions = [session(prefix)]
    for _ in range(num_prompts):
        sessions += [session(tokens(generator, PREFIX)), session(prefix)]
    async with baton("--model", model) as setup, setup.target() as target:
        outcomes = await run_closed(target, sessions, 1)
    cold_s = statistics.median(outcome.ttft_s for outcome in outcomes[1::2])
    warm_s = statistics.median(outcome.ttft_s for outcome in outcomes[2::2])
    return {
        "cold_ttft_p50_ms": cold_s * 1000,
        "warm_ttft_p50_ms": warm_s * 1000,
        "prompts_of_each": num_prompts,
        "warm_over_cold": at_most(warm_s / cold_s, 0.15, ""),
    }


# ---------------------------------------------------------------- a cache that nobody hits


class TimedPool(BlockPool):
    """Adds up the time inside the pool's calls that an engine makes."""

    inside_s = 0.0

    def _timed(self, call: Callable[[], T]) -> T:
        start_s = time.perf_counter()
        try:
            return call()
        finally:
            self.inside_s += time.perf_counter() - start_s

    def chain(self, tenant: str, cache_salt: str) -> TokenChain | None:
        return self._timed(lambda: super(TimedPool, self).chain(tenant, cache_salt))

    def match(
        self, chain: TokenChain | None, token_ids: Sequence[TokenId], max_blocks: int
    ) -> list[int]:
        return self._timed(lambda: super(TimedPool, self).match(chain, token_ids, max_blocks))

    def index(
        self, block: int, parent: int, chain: TokenChain, number: int, token_ids: Sequence[TokenId]
    ) -> int:
        return self._timed(
            lambda: super(TimedPool, self).index(block, parent, chain, number, token_ids)
        )

    def allocate(self, holding: Holding, num_blocks: int) -> list[int] | None:
        return self._timed(lambda: super(TimedPool, self).allocate(holding, num_blocks))

    def release(self, holding: Holding) -> None:
        self._timed(lambda: super(TimedPool, self).release(holding))


@dataclass(frozen=True, slots=True)
class Run:
    """One batch: seconds of its steps, inside the pool, and of the processor."""

    steps_s: float
    inside_s: float
    cpu_s: float


class EngineUnderTest:
    """One engine over its own KV pool. It takes over what the other's batch left in the cache, so
    that one with a prefix cache evicts as it would in service."""

    def __init__(self, model: Any, layout: KVLayout, has_cache: bool) -> None:
        num_blocks = 2 * BATCH * (PROMPT + OUTPUT) // BLOCK_SIZE + 1
        storage = torch.zeros((num_blocks, *layout.block_shape))
        prefix = PrefixCache(num_blocks) if has_cache else None
        self._pool = TimedPool(num_blocks, BLOCK_SIZE, "bench", prefix)
        self._engine = Engine(TorchRunner(model, KVCache(storage)), self._pool, SchedulerConfig())
        self._numbers = count()

    def run(self, prompts: Sequence[Sequence[TokenId]]) -> Run:
        params = SamplingParams(max_tokens=OUTPUT, seed=0, temperature=0.0)
        self._pool.inside_s = 0.0
        start_s, cpu_start_s = time.perf_counter(), time.process_time()
        for prompt in prompts:
            number = next(self._numbers)
            self._engine.add(
                SequenceSpec(SequenceId(number), str(number), 1, tuple(prompt), (), params)
            )
        while self._engine.has_work:
            self._engine.step()
        return Run(
            time.perf_counter() - start_s, self._pool.inside_s, time.process_time() - cpu_start_s
        )


def bench_never_hit(num_pairs: int, entry_dir: str) -> dict[str, Any]:
    entry = read_entry(Path(entry_dir))
    model = load_model(entry, torch.float32, torch.device("cpu"), kernel_set("torch"))
    config = entry.config
    layout = KVLayout(
        config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_size, "float32", "bench"
    )
    on, off = (EngineUnderTest(model, layout, has_cache) for has_cache in (True, False))
    generator = random.Random(SEED)
    shares, cpu_ratios = [], []
    # The first pair warms up and is not counted.
    for number in range(num_pairs + 1):
        prompts = [tokens(generator, PROMPT) for _ in range(BATCH)]
        # Each goes first in every other pair.
        engines = (on, off) if number % 2 else (off, on)
        runs = {engine: engine.run(prompts) for engine in engines}
        if number:
            shares.append((runs[on].inside_s - runs[off].inside_s) / runs[on].steps_s)
            cpu_ratios.append(runs[on].cpu_s / runs[off].cpu_s - 1)
    share, cpu = pair_interval(shares), pair_interval(cpu_ratios)
    return {
        "pairs": num_pairs,
        "batch": f"{BATCH} sequences, {PROMPT} tokens in, {OUTPUT} out",
        "cost_of_the_feature": at_most(share["median"] * 100, 1.0, "% of step time"),
        "cost_interval_95": [100 * bound for bound in share["interval_95"]],
        "cpu_per_token_more_percent": 100 * cpu["median"],
        "cpu_interval_95": [100 * bound for bound in cpu["interval_95"]],
    }


# ---------------------------------------------------------------- all of it


async def measure(num_pairs: int, num_prompts: int) -> dict[str, Any]:
    say = sys.stderr.write
    say("the pool's books ...\n")
    pool = bench_pool()
    entry_dir = await prepared("default")
    say("a warm prefix ...\n")
    warm = await bench_warm_prefix(num_prompts, entry_dir)
    say("a cache that nobody hits ...\n")
    never = bench_never_hit(num_pairs, entry_dir)
    return {
        "setup": {
            "pool_blocks": NUM_BLOCKS,
            "block_size": BLOCK_SIZE,
            "model": "SmolLM2-135M-Instruct",
            "warm_prefix": f"1 prefill, 1 decode worker; {PREFIX} + {TAIL} tokens, one at a time",
            "never_hit_threads": torch.get_num_threads(),
        },
        "pool": pool,
        "warm_prefix": warm,
        "never_hit": never,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=24, help="of runs with and without cache")
    parser.add_argument(
        "--prompts", type=int, default=8, help="with a warm prefix, and as many cold"
    )
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.pairs, arguments.prompts))
    print(json.dumps(rounded(result), indent=2))


if __name__ == "__main__":
    main()
