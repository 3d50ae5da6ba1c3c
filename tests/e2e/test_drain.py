"""Processes that are told to go, under load: they finish or hand over, leave nothing, exit 0."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from grpc import aio
from support.answers import answers_of
from support.cluster import REPOSITORY, Cluster, Process, baton_up
from support.oracle_requests import Answer, Case, ask, make_cases

from common import rpc
from common.client import BatonClient, Sampling, make_request
from common.wire import inference_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

BUDGET_S = 15.0
POLL_S = 0.05
NUM_CLIENTS = 4
# Between two requests of a client; the right answers take time to compute, too.
PAUSE_S = 0.2
FLAGS = [
    *("--num-blocks", "256", "--step-delay-ms", "2", "--lease-s", "3"),
    *("--drain-budget-s", str(BUDGET_S)),
]


# A worker on which a request of 500 tokens lasts for seconds.
SLOW = ("--step-delay-ms", "20")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("drain")
    async with baton_up(folder, prefill=2, decode=2, flags=FLAGS) as cluster:
        yield cluster


@dataclass
class Load:
    """Clients that ask one request after the other; a request that fails fails the test."""

    cluster: Cluster
    answers: list[Answer] = field(default_factory=list)

    async def until_more(self, num_answers: int) -> None:
        wanted = len(self.answers) + num_answers
        async with asyncio.timeout(60):
            while len(self.answers) < wanted:
                await asyncio.sleep(POLL_S)


@asynccontextmanager
async def load_on(cluster: Cluster) -> AsyncIterator[Load]:
    load, stopping = Load(cluster), asyncio.Event()
    cases = iter(make_cases(7, 10_000, prompt_tokens=(1, 200), max_tokens=(10, 80)))

    async def client_loop() -> None:
        async with BatonClient(cluster.grpc) as client:
            while not stopping.is_set():
                answer = await ask(client, next(cases))
                answer.assert_right()
                load.answers.append(answer)
                await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            group.create_task(client_loop())
        yield load
        stopping.set()
    await cluster.until_clean()


async def gone(process: Process, timeout_s: float) -> None:
    """Until the process has ended, and its pool with it."""
    async with asyncio.timeout(timeout_s):
        while psutil.pid_exists(process.pid):
            await asyncio.sleep(POLL_S)


@pytest.mark.fault("F24")
async def test_rolling_sigterm_of_every_worker(cluster: Cluster) -> None:
    before = cluster.log.read_text()
    async with load_on(cluster) as load:
        for pair in zip(cluster.of_role("prefill"), cluster.of_role("decode"), strict=True):
            await load.until_more(3)
            for worker in pair:
                worker.kill(signal.SIGTERM)
            for worker in pair:
                await gone(worker, BUDGET_S)
                assert not list(cluster.pool_dir.glob(f"*{worker.id}*"))
            for worker in pair:
                await cluster.until_back(worker)
        await load.until_more(10)
    told = cluster.log.read_text().removeprefix(before)
    for label in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        assert f"{label} ended with status 0" in told, told
    moved = sum(answer.attempts > 1 for answer in load.answers)
    print(f"{len(load.answers)} requests, {moved} moved")
    assert len(list(cluster.pool_dir.iterdir())) == len(cluster.workers)


async def test_scale_under_load(cluster: Cluster) -> None:
    before = {worker.id for worker in cluster.workers}
    async with load_on(cluster) as load:
        await load.until_more(2)
        change = await scale(cluster, "prefill=1", "decode=3")
        (started,), (drained,) = change["started"], change["drained"]
        assert {worker.id for worker in cluster.workers} == before - {drained} | {started}
        assert {p.role: len(cluster.of_role(p.role)) for p in cluster.workers} == {
            "prefill": 1,
            "decode": 3,
        }
        (newcomer,) = [worker for worker in cluster.workers if worker.id == started]
        await load.until_more(10)
        assert (await cluster.debug(newcomer, "statistics"))["engine"]["num_steps"] > 0
        change = await scale(cluster, "prefill=2", "decode=2")
        assert len(change["started"]) == 1 and change["drained"] == [started]
        assert not psutil.pid_exists(newcomer.pid)
        assert await scale(cluster, "prefill=2") == {"started": [], "drained": []}
    assert len(list(cluster.pool_dir.iterdir())) == len(cluster.workers) == 4


async def test_what_cannot_be_scaled(cluster: Cluster) -> None:
    for arguments, reason in (
        (["decode=0"], "at least one decode"),
        (["prefill=9999999999"], "at most 64"),
        (["gateway=2"], "'gateway=2' is not like prefill=2 or decode=2"),
    ):
        status, _, stderr = await baton(cluster, "scale", *arguments)
        assert status == 2 and reason in stderr and stderr.count("\n") == 1, stderr


async def scale(cluster: Cluster, *sizes: str) -> dict[str, Any]:
    status, stdout, stderr = await baton(cluster, "scale", *sizes, "--json")
    assert status == 0, stderr
    assert stderr == ""
    return dict(json.loads(stdout))


async def baton(cluster: Cluster, *arguments: str) -> tuple[int, str, str]:
    """Another command beside the running one."""
    runtime = Path(cluster.log).parent
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
    )
    async with asyncio.timeout(60):
        stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stdout.decode(), stderr.decode()


@pytest.mark.fault("F24")
async def test_what_does_not_finish_is_handed_over(cluster: Cluster) -> None:
    """A drain budget much shorter than the requests: they go on elsewhere, none is lost."""
    async with cluster.another("decode", "--drain-budget-s", "1", *SLOW) as worker:
        async with long_requests_on(cluster, worker, 9) as answers:
            worker.kill(signal.SIGTERM)
            await gone_or_zombie(worker, 4)
        assert any(answer.attempts > 1 for answer in answers)
    await cluster.until_clean()


@pytest.mark.fault("F24")
async def test_a_second_signal_ends_a_worker_at_once(cluster: Cluster) -> None:
    async with (
        cluster.another("decode", *SLOW) as worker,
        long_requests_on(cluster, worker, 10),
    ):
        worker.kill(signal.SIGTERM)
        await asyncio.sleep(0.5)
        assert psutil.Process(worker.pid).status() != psutil.STATUS_ZOMBIE
        worker.kill(signal.SIGTERM)
        await gone_or_zombie(worker, 1)
        assert not list(cluster.pool_dir.glob(f"*{worker.id}*"))
    await cluster.until_clean()


async def gone_or_zombie(worker: Process, timeout_s: float) -> None:
    """It is a child of ours, not waited for yet."""
    async with asyncio.timeout(timeout_s):
        while (
            psutil.pid_exists(worker.pid)
            and psutil.Process(worker.pid).status() != psutil.STATUS_ZOMBIE
        ):
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def long_requests_on(
    cluster: Cluster, worker: Process, seed: int
) -> AsyncIterator[list[Answer]]:
    """Long requests, some of them running on ``worker``. On leaving all have ended right. Each
    call has a seed of its own: the same ones would go to whoever has them cached."""
    cases = make_cases(seed, 6, prompt_tokens=(20, 60), max_tokens=(500, 500))
    answers: list[Answer] = []

    async def run(client: BatonClient, case: Case) -> None:
        answers.append(await ask(client, case))

    async with BatonClient(cluster.grpc) as client, asyncio.TaskGroup() as group:
        for case in cases:
            group.create_task(run(client, case))
        async with asyncio.timeout(30):
            while not await running_on(cluster, worker):
                await asyncio.sleep(POLL_S)
        yield answers
    for answer in answers:
        answer.assert_right()


async def running_on(cluster: Cluster, worker: Process) -> int:
    statistics = await cluster.debug(worker, "statistics")
    return int(statistics["engine"]["num_running"])


@pytest.mark.fault("F24")
async def test_a_gateway_drains_all_choices_to_their_ends(cluster: Cluster) -> None:
    """All of them end in one step, and wait for each other on the way to the client."""
    (gateway,) = cluster.of_role("gateway")
    (case,) = make_cases(12, 1, prompt_tokens=(30, 30), max_tokens=(150, 150))
    async with BatonClient(cluster.grpc) as client:
        asking = asyncio.create_task(
            answers_of(client, case.prompt_ids, Sampling(150, temperature=0.8, seed=1), n=8)
        )
        async with asyncio.timeout(10):
            while (await cluster.debug(gateway, "gateway"))["num_running"] != 8:
                await asyncio.sleep(POLL_S)
        gateway.kill(signal.SIGTERM)
        for answer in await asking:
            assert len(answer.token_ids) == 150
    await gone(gateway, BUDGET_S)
    await cluster.until_back(gateway)


@pytest.mark.fault("F24")
async def test_a_gateway_drains_its_streams(cluster: Cluster) -> None:
    before = cluster.log.read_text()
    (gateway,) = cluster.of_role("gateway")
    (case,) = make_cases(11, 1, prompt_tokens=(30, 30), max_tokens=(600, 600))
    async with BatonClient(cluster.grpc) as client:
        begun = asyncio.Event()
        asking = asyncio.create_task(ask(client, case, lambda _: begun.set()))
        await begun.wait()
        gateway.kill(signal.SIGTERM)
        await asyncio.sleep(0.3)
        async with rpc.make_public_channel(cluster.grpc) as channel:
            stub = inference_grpc.InferenceServiceStub(channel)
            with pytest.raises(aio.AioRpcError) as refused:
                await stub.Generate(make_request(case.prompt_ids, case.sampling)).read()
        assert refused.value.code().name == "UNAVAILABLE"
        (await asking).assert_right()
    await gone(gateway, BUDGET_S)
    await cluster.until_back(gateway)
    told = cluster.log.read_text().removeprefix(before)
    assert "gateway-0 ended with status 0" in told
    async with BatonClient(cluster.grpc) as client:
        (await ask(client, case)).assert_right()
