"""Five times what the workers can do: what is beyond the bound is refused, the rest is right."""

import asyncio
from collections import Counter
from pathlib import Path

import psutil
import pytest
from support.cluster import Cluster, baton_up
from support.oracle_requests import ask, make_cases

from common.client import BatonClient, Sampling
from common.errors import Overloaded

NUM_QUEUED = 32
FLAGS = [
    *("--num-blocks", "64", "--max-num-seqs", "4", "--step-delay-ms", "10"),
    *("--max-queued-requests", str(NUM_QUEUED)),
]
# Running, queued, and four times as many again.
NUM_AT_ONCE = 5 * (NUM_QUEUED + 8)
ROUNDS = 12
# What the gateway's memory may still grow by once everything has been there once.
GROWTH_BYTES = 8 << 20


@pytest.mark.fault("F17")
async def test_what_is_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    async with baton_up(tmp_path, flags=FLAGS) as cluster:
        cases = make_cases(1, NUM_AT_ONCE, prompt_tokens=(20, 100), max_tokens=(5, 10))
        async with BatonClient(cluster.grpc) as client:
            ends = await asyncio.gather(
                *(ask(client, case) for case in cases), return_exceptions=True
            )
        refused = [end for end in ends if isinstance(end, BaseException)]
        for refusal in refused:
            assert isinstance(refusal, Overloaded), refusal
            assert "requests are waiting" in refusal.message and refusal.retry_after_s > 0
        answered = [end for end in ends if not isinstance(end, BaseException)]
        for answer in answered:
            answer.assert_right()
        assert len(answered) >= NUM_QUEUED and refused
        await cluster.until_clean()


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.fault("F17")
async def test_memory_stays_flat(tmp_path: Path) -> None:
    """On the null model, so that nothing but the bookkeeping takes part."""
    async with baton_up(tmp_path, model="null", flags=FLAGS) as cluster:
        gateway = psutil.Process(cluster.of_role("gateway")[0].pid)
        sizes: list[int] = []
        ends: Counter[str] = Counter()
        for _ in range(ROUNDS):
            await _flood(cluster, ends)
            sizes.append(gateway.memory_info().rss)
        print(f"{dict(ends)}; MiB: {[size >> 20 for size in sizes]}")
        assert ends["answered"] and ends["refused"] > ends["answered"]
        assert max(sizes[ROUNDS // 2 :]) - sizes[ROUNDS // 3] < GROWTH_BYTES
        await cluster.until_clean()


async def _flood(cluster: Cluster, ends: Counter[str]) -> None:
    clock = asyncio.get_running_loop().time
    slowest_s = 0.0

    async def one(client: BatonClient) -> None:
        nonlocal slowest_s
        started_s = clock()
        num_tokens = 0
        try:
            async for chunk in client.generate([1] * 60, Sampling(max_tokens=8)):
                num_tokens += len(chunk.token_ids)
        except Overloaded:
            ends["refused"] += 1
            slowest_s = max(slowest_s, clock() - started_s)
            return
        assert num_tokens == 8
        ends["answered"] += 1

    async with BatonClient(cluster.grpc) as client:
        await asyncio.gather(*(one(client) for _ in range(NUM_AT_ONCE)))
    print(f"slowest refusal {slowest_s * 1000:.0f} ms, {NUM_AT_ONCE} asked at once")
