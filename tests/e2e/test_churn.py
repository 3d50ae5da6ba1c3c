"""Workers come and go under load: every request is answered right, or refused by name."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from support.cluster import Cluster, Process, baton_up, until
from support.oracle_requests import Case, ask, make_cases

from common.client import BatonClient
from common.errors import Overloaded

# Between two requests of a client: the right answers are computed here, too.
PAUSE_S = 0.3
DRAIN_S = 15.0
FLAGS = [
    *("--num-blocks", "256", "--step-delay-ms", "2", "--lease-s", "3"),
    *("--drain-budget-s", f"{DRAIN_S:g}"),
]


@dataclass
class Load:
    """``ends``: how each request ended. A wrong answer, or an error that is no refusal, fails."""

    num_sent: int = 0
    ends: Counter[str] = field(default_factory=Counter)

    async def one(self, client: BatonClient, case: Case) -> None:
        self.num_sent += 1
        try:
            answer = await ask(client, case)
        except Overloaded:
            self.ends["refused"] += 1
            return
        answer.assert_right()
        self.ends["moved" if answer.attempts > 1 else "stayed"] += 1


@asynccontextmanager
async def load_on(cluster: Cluster, num_clients: int) -> AsyncIterator[Load]:
    load, stopping = Load(), asyncio.Event()
    cases = iter(make_cases(3, 100_000, prompt_tokens=(1, 120), max_tokens=(1, 40)))

    async def client_loop() -> None:
        async with BatonClient(cluster.grpc) as client:
            while not stopping.is_set():
                await load.one(client, next(cases))
                await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(client_loop())
        try:
            yield load
        finally:
            stopping.set()
    await cluster.until_clean(30)


async def visit(cluster: Cluster, role: str, stay_s: float) -> None:
    """A worker joins, is used, stays a while and leaves in good order."""
    loop = asyncio.get_running_loop()
    async with cluster.another(role) as worker:
        joined_s = loop.time()

        async def is_used() -> bool:
            statistics = await cluster.debug(worker, "statistics")
            return bool(statistics["engine"]["num_steps"])

        await until(is_used, timeout_s=30)
        print(f"{worker.id} had its first step {loop.time() - joined_s:.2f} s after it was known")
        await asyncio.sleep(stay_s)
        worker.kill(signal.SIGTERM)
        async with asyncio.timeout(2 * DRAIN_S):
            while not has_ended(worker):
                await asyncio.sleep(0.05)


def has_ended(worker: Process) -> bool:
    """It is a child of ours, not waited for yet."""
    if not psutil.pid_exists(worker.pid):
        return True
    return psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE


async def churn(
    folder: Path, num_clients: int, num_visits: int, every_s: float, stay_s: float
) -> None:
    """Visits begin ``every_s`` apart, the pools in turn; those that `baton up` started stay."""
    async with baton_up(folder, local_prefill="auto", flags=FLAGS) as cluster:
        async with load_on(cluster, num_clients) as load, asyncio.TaskGroup() as group:
            for number in range(num_visits):
                role = ("prefill", "decode")[number % 2]
                group.create_task(visit(cluster, role, stay_s))
                await asyncio.sleep(every_s)
        print(f"{load.num_sent} sent: {dict(load.ends)}")
        assert load.num_sent == load.ends.total()
        assert load.ends["stayed"] + load.ends["moved"] > num_clients
        assert (await cluster.debug(cluster.of_role("gateway")[0], "gateway"))["counters"][
            "failed"
        ] == load.ends["refused"]


@pytest.mark.full
@pytest.mark.timeout(180)
async def test_a_prefill_and_a_decode_worker_come_and_go(tmp_path: Path) -> None:
    await churn(tmp_path, num_clients=16, num_visits=2, every_s=3.0, stay_s=3.0)


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_churn_for_two_minutes(tmp_path: Path) -> None:
    """A join every 12 s and a stay of 18: something comes or goes every 6 s."""
    await churn(tmp_path, num_clients=50, num_visits=10, every_s=12.0, stay_s=18.0)
