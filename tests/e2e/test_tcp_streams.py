"""Many streams at once whose KV goes from worker to worker by tcp."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.cluster import baton_up
from support.oracle_requests import BLOCK_SIZE, ask_all, make_cases

from common.client import BatonClient
from engine.oracle import oracle_layout

FLAGS = ["--transport", "tcp", "--num-blocks", "64", "--step-delay-ms", "1", "--lease-s", "3"]


async def assert_streams_over_tcp(
    folder: Path, num_streams: int, flags: Sequence[str], prefill: int = 1, decode: int = 1
) -> None:
    """The answers are the oracle's, and every block of every prompt came by tcp."""
    cases = make_cases(1, num_streams, prompt_tokens=(1, 300), max_tokens=(2, 60))
    async with baton_up(folder, prefill=prefill, decode=decode, flags=flags) as cluster:
        async with BatonClient(cluster.grpc) as client:
            answers = await ask_all(client, cases)
            num_blocks = sum(case.num_prompt_blocks for case in cases)
            num_bytes = num_blocks * oracle_layout(BLOCK_SIZE).block_bytes
            moved = await _moved(client, num_bytes)
        for answer in answers:
            answer.assert_right()
            assert answer.attempts == 1
            assert answer.completion is not None
            usage = answer.completion.usage
            assert usage.prefill_computed == usage.decode_transferred == usage.prompt_tokens
        assert moved == {"tcp": num_bytes}
        assert not list(cluster.pool_dir.iterdir()), "a pool that could be shared"
        await cluster.until_clean()


async def test_streams_over_tcp(tmp_path: Path) -> None:
    await assert_streams_over_tcp(tmp_path, 64, FLAGS)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
async def test_many_streams_over_tcp(tmp_path: Path, seed: int) -> None:
    await assert_streams_over_tcp(tmp_path, 200, FLAGS, prefill=1 + seed, decode=2)


async def _moved(client: BatonClient, expected: int) -> dict[str, int]:
    """Bytes by transport, over the decode workers, once their reports have come (each second)."""
    for _ in range(100):
        moved: dict[str, int] = {}
        for worker in (await client.list_workers()).workers:
            for name, num_bytes in worker.bytes_moved.items() if worker.role == "decode" else ():
                moved[name] = moved.get(name, 0) + num_bytes
        if sum(moved.values()) >= expected:
            break
        await asyncio.sleep(0.05)
    return moved
