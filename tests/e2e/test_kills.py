"""Workers killed with SIGKILL in the middle of their work: one right answer, after a pause.

A worker that is to die is one more than `baton up` has started, with a failpoint that kills it at
one exact place. The pauses that a client sees are printed (`pytest -s`).
"""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Sequence

import psutil
import pytest
import pytest_asyncio
from support.cluster import Cluster, Process, baton_up, until
from support.oracle_requests import BLOCK_SIZE, Answer, Case, ask, ask_all, make_cases

from common.client import BatonClient

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLAGS = ["--num-blocks", "64", "--step-delay-ms", "2", "--lease-s", "3"]
# Longer than a process may be silent before it is taken for dead.
DEAD_S = 4.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("kills")
    async with baton_up(folder, flags=FLAGS) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[BatonClient]:
    async with BatonClient(cluster.grpc) as client:
        yield client


def dies_at(place: str, hit: int) -> list[str]:
    return ["--allow-failpoints", "--failpoints", f"{place}=kill@{hit}"]


def is_dead(process: Process) -> bool:
    return not psutil.pid_exists(process.pid)


def num_moved(answers: Sequence[Answer]) -> int:
    """All must be right; how many took a second attempt, which is the most that one death costs."""
    for answer in answers:
        answer.assert_right()
    moved = [answer for answer in answers if answer.attempts > 1]
    longest_s = max(answer.longest_pause_s for answer in answers)
    print(f"{len(moved)} of {len(answers)} moved, longest pause {longest_s:.2f} s")
    assert all(answer.attempts == 2 for answer in moved)
    return len(moved)


def check(answers: Sequence[Answer]) -> None:
    """All right, and some by a second attempt."""
    assert num_moved(answers)


@pytest.mark.fault("F1")
async def test_prefill_worker_with_jobs_of_the_shared_queue(
    cluster: Cluster, client: BatonClient
) -> None:
    cases = make_cases(1, 32, prompt_tokens=(20, 300), max_tokens=(1, 20))
    async with cluster.another("prefill", *dies_at("prefill.chunk", 2)) as victim:
        check(await ask_all(client, cases))
        assert is_dead(victim)
    await cluster.until_clean()


@pytest.mark.fault("F1")
async def test_prefill_worker_that_was_chosen_for_its_prefix(
    cluster: Cluster, client: BatonClient
) -> None:
    async with cluster.another("prefill", *dies_at("prefill.chunk", 2)) as victim:
        for case in make_cases(2, 60, prompt_tokens=(64, 64), max_tokens=(2, 2)):
            await ask(client, case)
            if (await cluster.debug(victim, "statistics"))["granted"]:
                break
        (gateway,) = cluster.of_role("gateway")

        async def is_known() -> bool:
            index = (await cluster.debug(gateway, "gateway"))["prefix_index"]
            return bool(index["num_keys_by_worker"][victim.id] >= 64 // BLOCK_SIZE)

        await until(is_known, timeout_s=10)
        # Nobody else has computed this prompt.
        longer = Case(case.prompt_ids + tuple(range(40)), max_tokens=10, seed=3)
        check([await ask(client, longer)])
        assert is_dead(victim)
    await cluster.until_clean()


@pytest.mark.parametrize(
    ("place", "hit"),
    [
        pytest.param("decode.after_send", 1, id="first"),
        pytest.param("decode.before_send", 20, id="middle"),
        pytest.param("decode.before_send", 39, id="last"),
    ],
)
@pytest.mark.fault("F4", "F5")
async def test_decode_worker_in_mid_stream(
    cluster: Cluster, client: BatonClient, place: str, hit: int
) -> None:
    await _kill_decode(cluster, client, seed=hit, place=place, hit=hit)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.fault("F4")
async def test_decode_worker_at_random_points(
    cluster: Cluster, client: BatonClient, seed: int
) -> None:
    rng = random.Random(seed)
    place = rng.choice(["decode.after_send", "decode.before_send", "decode.before_settle"])
    hit = 1 if place == "decode.before_settle" else rng.randint(1, 38)
    await _kill_decode(cluster, client, seed, place, hit)


async def _kill_decode(
    cluster: Cluster, client: BatonClient, seed: int, place: str, hit: int
) -> None:
    """A greedy and a sampled stream of 40 tokens on the worker that dies: the one with most room,
    which therefore gets both."""
    first, second = make_cases(seed, 2, prompt_tokens=(20, 200), max_tokens=(40, 40))
    if seed % 2:
        first, second = second, first
    async with cluster.another("decode", "--num-blocks", "256", *dies_at(place, hit)) as victim:
        begun = asyncio.Event()
        leading = asyncio.create_task(ask(client, first, lambda _: begun.set()))
        await begun.wait()
        check([await ask(client, second), await leading])
        assert is_dead(victim)
    await cluster.until_clean()


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.fault("F1", "F4")
async def test_workers_killed_under_load(cluster: Cluster, client: BatonClient) -> None:
    """At a random moment a worker may hold nothing; over all rounds some had work to move."""
    moved = 0
    for seed in range(20, 26):
        cases = make_cases(seed, 48, prompt_tokens=(1, 200), max_tokens=(20, 80))
        async with cluster.another(("prefill", "decode")[seed % 2]) as victim:
            tasks = [asyncio.create_task(ask(client, case)) for case in cases]
            await asyncio.sleep(random.Random(seed).uniform(0.2, 1.0))
            victim.kill()
            moved += num_moved(await asyncio.gather(*tasks))
        await cluster.until_clean()
    assert moved


@pytest.mark.fault("F4")
async def test_a_stream_waits_for_the_prefill_pool(cluster: Cluster, client: BatonClient) -> None:
    """Its decode worker dies while no prefill worker is there to compute it anew."""
    (case,) = make_cases(9, 1, prompt_tokens=(50, 50), max_tokens=(400, 400))
    (prefill,) = cluster.of_role("prefill")
    victim_flags = ("--num-blocks", "256", "--step-delay-ms", "20")
    async with cluster.another("decode", *victim_flags) as victim:
        begun = asyncio.Event()
        task = asyncio.create_task(ask(client, case, lambda _: begun.set()))
        await begun.wait()
        prefill.kill(signal.SIGSTOP)
        try:
            await asyncio.sleep(DEAD_S)
            victim.kill()
            await asyncio.sleep(1.0)
            assert not task.done()
        finally:
            prefill.kill(signal.SIGCONT)
        check([await task])
    await cluster.until_clean()
