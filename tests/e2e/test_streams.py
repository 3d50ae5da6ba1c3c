"""Many streams at once over two prefill and two decode workers, and the path that they took."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.cluster import Cluster, baton_up
from support.oracle_requests import BLOCK_SIZE, Answer, ask_all, make_cases

from common.client import BatonClient
from engine.oracle import oracle_layout

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 64
FLAGS = ["--num-blocks", "64", "--step-delay-ms", "1", "--lease-s", "3"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("streams")
    async with baton_up(folder, prefill=2, decode=2, flags=FLAGS) as cluster:
        yield cluster


async def test_concurrent_streams_are_right(cluster: Cluster) -> None:
    cases = make_cases(1, NUM_STREAMS, prompt_tokens=(1, 300), max_tokens=(1, 60))
    async with BatonClient(cluster.grpc) as client:
        answers = await ask_all(client, cases)
        for answer in answers:
            answer.assert_right()
            assert answer.attempts == 1
        await _assert_path(cluster, client, answers)
    await cluster.until_clean()


async def _assert_path(cluster: Cluster, client: BatonClient, answers: list[Answer]) -> None:
    """Every prompt was computed in one process and copied, block by block, into another."""
    handed_off = [answer for answer in answers if answer.case.max_tokens > 1]
    for answer in handed_off:
        assert answer.completion is not None
        usage = answer.completion.usage
        assert usage.prefill_computed == usage.decode_transferred == usage.prompt_tokens
        assert usage.prefill_cached == usage.decode_cached == usage.decode_computed == 0
    num_blocks = sum(answer.case.num_prompt_blocks for answer in handed_off)
    num_bytes = num_blocks * oracle_layout(BLOCK_SIZE).block_bytes
    assert await _bytes_moved(client, num_bytes) == num_bytes

    workers = (await client.list_workers()).workers
    assert sorted(worker.role for worker in workers) == ["decode", "decode", "prefill", "prefill"]
    assert len({worker.pid for worker in workers}) == 4
    for worker in workers:
        assert {name for name, moved in worker.bytes_moved.items() if moved} == {"shm"}
    for process in cluster.workers:
        engine = (await cluster.debug(process, "statistics"))["engine"]
        if process.role == "prefill":
            assert engine["num_prefill_tokens"] > 0
        else:
            assert engine["num_decode_tokens"] > 0


async def _bytes_moved(client: BatonClient, expected: int) -> int:
    """Sum over the decode workers, once their reports have come (each second)."""
    for _ in range(100):
        workers = (await client.list_workers()).workers
        moved = sum(w.bytes_moved["shm"] for w in workers if w.role == "decode")
        if moved >= expected:
            break
        await asyncio.sleep(0.05)
    return moved
