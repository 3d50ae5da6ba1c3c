"""Two gateways over the same small pools; then one of them is killed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import pytest
import pytest_asyncio
from support.cluster import Cluster, baton_up
from support.oracle_requests import Answer, ask, ask_all, make_cases

from common.client import BatonClient

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_REQUESTS = 200
LEASE_S = 3.0
FLAGS = [
    *("--gateways", "2", "--num-blocks", "64"),
    *("--step-delay-ms", "1", "--lease-s", str(LEASE_S)),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("gateways")
    async with baton_up(folder, prefill=2, decode=2, flags=FLAGS) as cluster:
        yield cluster


@dataclass
class Promises:
    """The most that any decode worker was seen to have promised."""

    limit: int = 0
    most: int = 0
    num_looks: int = 0


@asynccontextmanager
async def watched_promises(cluster: Cluster) -> AsyncIterator[Promises]:
    """Looks all the time; fails on the first promise beyond a worker's limit."""
    seen = Promises()

    async def look() -> None:
        while True:
            for worker in cluster.of_role("decode"):
                statistics = await cluster.debug(worker, "statistics")
                reservations = statistics["reservations"]
                seen.limit = reservations["limit_blocks"]
                seen.most = max(seen.most, reservations["promised_blocks"])
                seen.num_looks += 1
                assert seen.most <= seen.limit
            await asyncio.sleep(0.02)

    looking = asyncio.create_task(look())
    try:
        yield seen
    finally:
        if looking.done():
            looking.result()
        looking.cancel()


async def test_two_gateways_share_the_pools(cluster: Cluster) -> None:
    cases = make_cases(2, 2 * NUM_REQUESTS, prompt_tokens=(1, 200), max_tokens=(1, 40))
    one, two = (BatonClient(target) for target in cluster.gateways)
    async with one, two, watched_promises(cluster) as promises:
        answers = await asyncio.gather(
            ask_all(one, cases[:NUM_REQUESTS]), ask_all(two, cases[NUM_REQUESTS:])
        )
    for answer in (*answers[0], *answers[1]):
        answer.assert_right()
        assert answer.attempts == 1
    print(f"promised at most {promises.most} of {promises.limit} in {promises.num_looks} looks")
    assert promises.limit == 80 and promises.most > 40 and promises.num_looks > 20
    await cluster.until_clean()


@pytest.mark.fault("F14")
async def test_a_killed_gateway_leaves_the_other_alone(cluster: Cluster) -> None:
    await _kill_one(cluster, seed=3, after_s=1.0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4, 9))
@pytest.mark.fault("F14")
async def test_gateways_killed_again_and_again(cluster: Cluster, seed: int) -> None:
    await _kill_one(cluster, seed, after_s=0.2 * (seed - 3))


async def _kill_one(cluster: Cluster, seed: int, after_s: float) -> None:
    clock = asyncio.get_running_loop().time
    other, victim = cluster.of_role("gateway")
    cases = make_cases(seed, 96, prompt_tokens=(1, 200), max_tokens=(100, 200))
    one, two = BatonClient(other.grpc), BatonClient(victim.grpc)
    async with one, two:
        mine = [asyncio.create_task(ask(one, case)) for case in cases[:32]]
        with _abandoned([asyncio.create_task(ask(two, case)) for case in cases[32:]]) as others:
            await asyncio.sleep(after_s)
            before = await cluster.debug(victim, "gateway")
            victim.kill()
            killed_s = clock()
        answers: list[Answer] = await asyncio.gather(*mine)
    await asyncio.gather(*others, return_exceptions=True)
    assert before["num_running"] > 0, "it had nothing to lose"
    for answer in answers:
        answer.assert_right()
        assert answer.attempts == 1
    print(f"{before['num_running']} requests died with their gateway")
    await cluster.until_back(victim)
    await cluster.until_clean(max(1.0, killed_s + 2 * LEASE_S - clock()))


@contextmanager
def _abandoned(tasks: list[asyncio.Task[Answer]]) -> Iterator[list[asyncio.Task[Answer]]]:
    """Requests whose clients give up at the end of the block."""
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
