"""A gateway that stands still, or answers nothing: it harms its own clients alone, and those only
by a pause."""

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from faults.history import watch
from support.cluster import Cluster, baton_up
from support.oracle_requests import make_cases

from common.client import BatonClient

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLAGS = [
    *("--gateways", "2", "--num-blocks", "128", "--step-delay-ms", "10", "--lease-s", "3"),
    "--allow-failpoints",
]
# Longer than the silence after which a process counts as dead.
STANDSTILL_S = 4.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with baton_up(tmp_path_factory.mktemp("standstill"), flags=FLAGS) as cluster:
        yield cluster


@pytest.mark.full
@pytest.mark.fault("F6", "F14")
async def test_a_gateway_that_stood_still_twice_has_lost_no_request(cluster: Cluster) -> None:
    """Two owners that died would end it; here nobody died."""
    gateway = cluster.of_role("gateway")[0]
    (case,) = make_cases(1, 1, prompt_tokens=(40, 40), max_tokens=(700, 700))
    async with BatonClient(gateway.grpc) as client:
        asking = asyncio.create_task(watch(client, case))
        for _ in range(2):
            await asyncio.sleep(1.5)
            gateway.kill(signal.SIGSTOP)
            try:
                await asyncio.sleep(STANDSTILL_S)
            finally:
                gateway.kill(signal.SIGCONT)
        assert not asking.done()
        history = await asking
    assert history.refusal is None and history.faults() == []
    assert history.longest_pause_s > STANDSTILL_S - 0.5
    counters = (await cluster.debug(gateway, "gateway"))["counters"]
    assert counters["poison"] == 0
    await cluster.until_clean(20)


@pytest.mark.fault("F14")
async def test_a_gateway_that_answers_no_accept_keeps_no_worker_from_the_other(
    cluster: Cluster,
) -> None:
    """There is one prefill worker, and it asks for ten seconds."""
    deaf, well = cluster.of_role("gateway")
    case, other = make_cases(2, 2, prompt_tokens=(40, 40), max_tokens=(10, 10))
    async with BatonClient(deaf.grpc) as client, BatonClient(well.grpc) as neighbour:
        await cluster.arm(deaf, "gateway.before_accept_reply=drop")
        asking = asyncio.create_task(watch(client, case))
        async with asyncio.timeout(10):
            while not (await cluster.debug(deaf, "failpoints")).get("gateway.before_accept_reply"):
                await asyncio.sleep(0.05)
        async with asyncio.timeout(6):
            history = await watch(neighbour, other)
        assert history.refusal is None and history.faults() == []
        await cluster.arm(deaf, "")
        history = await asking
    assert history.refusal is None and history.faults() == []
    await cluster.until_clean(20)
