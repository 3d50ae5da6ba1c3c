"""A worker that NATS still hears but nobody can reach any more, and is reached again."""

import asyncio
from pathlib import Path

import pytest
from faults.history import History, watch
from support.cluster import baton_up
from support.cut_proxy import cut_proxy
from support.oracle_requests import Case, make_cases

from common.client import BatonClient

FLAGS = ["--num-blocks", "128", "--step-delay-ms", "4", "--lease-s", "3"]
# Longer than anyone waits for a sign of life.
CUT_S = 6.0


@pytest.mark.full
@pytest.mark.fault("F12")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_is_cut_off_and_reached_again(tmp_path: Path, role: str) -> None:
    """Every answer is right and none ends with an error: another worker takes over."""
    async with (
        baton_up(tmp_path, flags=FLAGS) as cluster,
        cut_proxy() as proxy,
        cluster.another(role, *proxy.flags) as worker,
        BatonClient(cluster.grpc) as client,
    ):
        running = asyncio.create_task(_load(client, 1, 60))
        await asyncio.sleep(1.0)
        proxy.cut()
        await asyncio.sleep(CUT_S)
        proxy.heal()
        histories = await running
        for history in histories:
            assert history.faults() == [] and history.refusal is None, history.refusal
        assert any(history.attempts > 1 for history in histories), "nobody noticed"
        await cluster.until_known(worker.id)
        for history in await _load(client, 2, 24):
            assert history.faults() == [] and history.refusal is None, history.refusal
        await cluster.until_clean(others=[worker])


async def _load(client: BatonClient, seed: int, num_requests: int) -> list[History]:
    """Twelve at a time."""
    gate = asyncio.Semaphore(12)

    async def one(case: Case) -> History:
        async with gate:
            return await watch(client, case)

    cases = make_cases(seed, num_requests, prompt_tokens=(1, 200), max_tokens=(60, 200))
    return list(await asyncio.gather(*map(one, cases)))
