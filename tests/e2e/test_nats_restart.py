"""nats-server dies, and workers stand still: what runs goes on, once, and nobody is misled."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from support.cluster import Cluster, Process, baton_up, until
from support.oracle_requests import Answer, ask, make_cases

from common.client import BatonClient

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLAGS = ["--num-blocks", "512", "--step-delay-ms", "5", "--lease-s", "3"]
HICCUP_S = 1.5
FREEZE_S = 6.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("nats")
    async with baton_up(folder, prefill=2, decode=2, flags=FLAGS) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[BatonClient]:
    async with BatonClient(cluster.grpc) as client:
        yield client


class Streams:
    """Long streams, started together."""

    def __init__(self, client: BatonClient, seed: int, num_streams: int, max_tokens: int) -> None:
        self._begun = asyncio.Semaphore(0)
        self._num_streams = num_streams
        cases = make_cases(seed, num_streams, (20, 100), (max_tokens, max_tokens))
        self._tasks = [asyncio.create_task(ask(client, case, self._on_tokens)) for case in cases]

    def _on_tokens(self, answer: Answer) -> None:
        if len(answer.arrivals_s) == 2:
            self._begun.release()

    async def begun(self, all_but: int = 0) -> None:
        for _ in range(self._num_streams - all_but):
            await self._begun.acquire()

    @property
    def num_running(self) -> int:
        return sum(not task.done() for task in self._tasks)

    async def right(self) -> list[Answer]:
        answers = await asyncio.gather(*self._tasks)
        for answer in answers:
            answer.assert_right()
        return answers


@pytest.mark.fault("F9", "F10")
async def test_nats_killed_under_load(cluster: Cluster, client: BatonClient) -> None:
    await _kill_nats(cluster, client, seed=1, num_kills=1)


@pytest.mark.full
@pytest.mark.fault("F9", "F10")
async def test_nats_killed_again_and_again(cluster: Cluster, client: BatonClient) -> None:
    await _kill_nats(cluster, client, seed=2, num_kills=5)


async def _kill_nats(cluster: Cluster, client: BatonClient, seed: int, num_kills: int) -> None:
    for number in range(num_kills):
        streams = Streams(client, seed + 100 * number, 16, 250)
        await streams.begun()
        server = cluster.child("nats-server")
        server.kill()
        assert streams.num_running == 16
        late = Streams(client, seed + 100 * number + 50, 16, 20)
        for answer in await streams.right():
            assert answer.attempts == 1
        # They were sent while nobody could publish their jobs.
        for answer in await late.right():
            assert answer.attempts >= 1
        assert cluster.child("nats-server").pid != server.pid
    await cluster.until_clean()


@pytest.mark.fault("F6")
async def test_a_hiccup_changes_nothing(cluster: Cluster, client: BatonClient) -> None:
    """Even of all processes at once."""
    streams = Streams(client, 3, 16, 200)
    await streams.begun()
    for process in cluster.processes:
        process.kill(signal.SIGSTOP)
    await asyncio.sleep(HICCUP_S)
    for process in cluster.processes:
        process.kill(signal.SIGCONT)
    for answer in await streams.right():
        assert answer.attempts == 1
    await cluster.until_clean()


@pytest.mark.fault("F6")
async def test_zombies_are_fenced(cluster: Cluster, client: BatonClient) -> None:
    """Workers that stand still too long have their work moved, and wake up with it in their hands:
    a decode worker with streams, a prefill worker with a ticket that it is about to send."""
    flags = ("--allow-failpoints", "--failpoints", "prefill.before_ticket=sleep:3@1")
    async with cluster.another("prefill", *flags) as prefill:
        streams = Streams(client, 4, 24, 300)
        await streams.begun(all_but=1)

        async def holds_a_ticket() -> bool:
            return bool((await cluster.ledger(prefill))["ledger"]["counts"]["leased"])

        await until(holds_a_ticket, 20)
        before = await _fenced(cluster)
        async with _frozen(prefill), _frozen(await _busiest(cluster, "decode")):
            answers = await streams.right()
        moved = [answer for answer in answers if answer.attempts > 1]
        longest_s = max(answer.longest_pause_s for answer in answers)
        print(f"{len(moved)} of {len(answers)} moved, longest pause {longest_s:.2f} s")
        assert len(moved) > 1

        async def has_fenced() -> bool:
            return await _fenced(cluster) > before

        await until(has_fenced, 10)
        await cluster.until_clean()
        counts = (await cluster.ledger(prefill))["ledger"]["counts"]
        assert not counts["leased"] and not counts["in_use"]


@asynccontextmanager
async def _frozen(process: Process) -> AsyncIterator[None]:
    """Stands still during the block, and for `FREEZE_S` at least."""
    process.kill(signal.SIGSTOP)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(FREEZE_S))
            yield
    finally:
        process.kill(signal.SIGCONT)


async def _busiest(cluster: Cluster, role: str) -> Process:
    running = {}
    for worker in cluster.of_role(role):
        statistics = await cluster.debug(worker, "statistics")
        running[worker] = statistics["engine"]["num_running"]
    return max(running, key=lambda worker: running[worker])


async def _fenced(cluster: Cluster) -> int:
    (gateway,) = cluster.of_role("gateway")
    statistics = await cluster.debug(gateway, "gateway")
    return int(statistics["counters"]["fenced"])
