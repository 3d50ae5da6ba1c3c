"""A message lost, doubled or late, an answer that never comes, a bug: at every step of the protocol
(docs/design.md, sections 2 and 6). The scenarios are data; all run against one cluster.

Each arms one place in running processes, sends requests with a common prefix, and wants every
answer right and both ledgers empty again. ``raise`` stands for a bug: it may end a request with a
typed error, and never with a wrong token. Every failure names its seed and spec.
"""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import pytest
import pytest_asyncio
from faults.history import History, watch
from support.cluster import Cluster, Process, baton_up
from support.oracle_requests import VOCAB_SIZE, Case

from common.client import BatonClient
from common.errors import InternalError, Unavailable
from common.failpoints import FAILPOINTS, OBEYED

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLAGS = ["--num-blocks", "96", "--step-delay-ms", "3", "--lease-s", "3", "--chaos"]
PREFIX_TOKENS = 64
_family = count()


@dataclass(frozen=True)
class Scenario:
    """``also``: armed beside it, so that the place is reached. ``leaves``: the clients leave."""

    place: str
    action: str
    also: str = ""
    max_tokens: int = 12
    leaves: bool = False

    def __str__(self) -> str:
        return f"{self.place}={self.action}"

    @property
    def spec(self) -> str:
        return ";".join(filter(None, (f"{self.place}={self.action}", self.also)))

    @property
    def roles(self) -> Sequence[str]:
        part = self.place.partition(".")[0]
        return {
            "gateway": ("gateway",),
            "prefill": ("prefill",),
            "export": ("prefill",),
            "decode": ("decode",),
            "transfer": ("decode",),
            "engine": ("prefill", "decode"),
            "worker": ("prefill", "decode"),
        }[part]


SLOW_COPY = "decode.copy_block=sleep:0.3"
SLOW_ACCEPT = "gateway.before_accept_reply=sleep:0.1"
SLOW_CLAIM = "export.before_claim_reply=sleep:0.2"
LOST = [
    Scenario("gateway.before_publish", "drop@1"),
    Scenario("gateway.before_publish", "dup"),
    Scenario("gateway.before_accept_reply", "drop@1"),
    Scenario("gateway.before_ticket_reply", "drop@1"),
    Scenario("gateway.before_renew", "drop", max_tokens=400),
    Scenario("gateway.before_cancel", "drop", also=SLOW_ACCEPT, leaves=True),
    Scenario("gateway.before_heartbeat", "drop@1", max_tokens=200),
    Scenario("prefill.after_pull", "drop@1"),
    Scenario("prefill.before_chosen_reply", "drop@1"),
    Scenario("prefill.before_accept", "dup"),
    Scenario("prefill.before_ack", "drop@1"),
    Scenario("prefill.before_ticket", "dup"),
    Scenario("decode.copy_block", "drop@2"),
    Scenario("decode.before_renew", "drop@1", also=SLOW_COPY),
    Scenario("decode.before_send", "drop@4"),
    Scenario("decode.before_send", "dup"),
    Scenario("decode.before_heartbeat", "drop@1", max_tokens=200),
    Scenario("export.before_claim_reply", "drop@1"),
    Scenario("export.before_renew_reply", "drop@1", max_tokens=400),
    Scenario("export.before_settle_reply", "drop@1"),
    Scenario("export.before_release_reply", "drop@1", also=SLOW_CLAIM, leaves=True),
    Scenario("transfer.corrupt_block", "corrupt@2"),
    Scenario("transfer.corrupt_checksum", "corrupt@2"),
    Scenario("worker.report", "drop@1"),
]  # fmt: skip
# How each place is reached, where plain requests do not reach it.
REACHED = {scenario.place: scenario for scenario in LOST} | {
    "engine.row": Scenario("engine.row", "", also="engine.step=raise@1")
}


def scenario_of(place: str, action: str) -> Scenario:
    return replace(REACHED.get(place, Scenario(place, "")), action=action)


RAISED = [
    # One is quick: what a step's records lose must not be its prompts' blocks.
    pytest.param(
        scenario_of(place, "raise@1"), marks=[] if place == "prefill.chunk" else [pytest.mark.full]
    )
    for place in FAILPOINTS
    if place not in OBEYED
]
LATE = [scenario_of(place, "sleep:0.5@1") for place in FAILPOINTS]
# Of the quick scenarios: one run, and four more.
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(11, 15))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("protocol")
    async with baton_up(folder, prefill=2, flags=FLAGS, allow_tracebacks=True) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[BatonClient]:
    async with BatonClient(cluster.grpc) as client:
        yield client


async def test_all_places_that_obey_are_in_the_table() -> None:
    named = {(scenario.place, scenario.action.partition("@")[0]) for scenario in LOST}
    assert named == {(place, action) for place, actions in OBEYED.items() for action in actions}


@pytest.mark.fault("F2", "F5", "F21", "F28")
@pytest.mark.parametrize("scenario", LOST, ids=str)
@pytest.mark.parametrize("seed", SEEDS)
async def test_lost_doubled_or_corrupted(
    cluster: Cluster, client: BatonClient, scenario: Scenario, seed: int
) -> None:
    for history in await _run(cluster, client, scenario, seed):
        assert history.refusal is None or scenario.leaves, f"{scenario}: {history.refusal}"


@pytest.mark.fault("V23", "F15")
@pytest.mark.parametrize("scenario", RAISED, ids=str)
async def test_a_bug_at_each_step(
    cluster: Cluster, client: BatonClient, scenario: Scenario
) -> None:
    for history in await _run(cluster, client, scenario, seed=2):
        assert history.refusal is None or isinstance(history.refusal, InternalError | Unavailable)


@pytest.mark.full
@pytest.mark.fault("F15")
@pytest.mark.parametrize("scenario", LATE, ids=str)
async def test_late_at_each_step(cluster: Cluster, client: BatonClient, scenario: Scenario) -> None:
    for history in await _run(cluster, client, scenario, seed=3):
        assert history.refusal is None, f"{scenario}: {history.refusal}"


# ---------------------------------------------------------------- faults that do not go away


@pytest.mark.fault("F8", "F28")
async def test_a_request_that_fails_each_time_is_given_up(
    cluster: Cluster, client: BatonClient
) -> None:
    """Every copy is corrupt: three failures, no storm, and nobody dies of it."""
    (decode,) = cluster.of_role("decode")
    before = await _counter(cluster, "jobs_published")
    await cluster.arm(decode, "transfer.corrupt_block=corrupt")
    try:
        (case,) = make_family(4, 1, 12)
        history = await watch(client, case)
    finally:
        await cluster.arm(decode, "")
    assert isinstance(history.refusal, Unavailable)
    assert "given up after 3 failures; 3 tokens were given" in str(history.refusal)
    assert history.faults() == []
    assert await _counter(cluster, "jobs_published") - before == 3
    await cluster.until_clean()


@pytest.mark.fault("F22")
async def test_a_request_that_kills_its_workers_is_poison(
    cluster: Cluster, client: BatonClient
) -> None:
    victims = cluster.of_role("prefill")
    for process in victims:
        await cluster.arm(process, "prefill.chunk=kill@1")
    (case,) = make_family(5, 1, 12)
    # A successor that is soon back would take the request, and kills nobody.
    cluster.process.send_signal(signal.SIGSTOP)
    try:
        history = await watch(client, case)
    finally:
        cluster.process.send_signal(signal.SIGCONT)
    assert isinstance(history.refusal, InternalError)
    assert "two workers were lost while they held this request" in str(history.refusal)
    assert not history.token_ids
    for process in victims:
        await cluster.until_back(process)
    assert (await watch(client, case)).faults() == []
    await cluster.until_clean()


@pytest.mark.fault("F7")
async def test_all_decode_workers_dead(cluster: Cluster, client: BatonClient) -> None:
    """What had begun goes on when one is back, or ends with UNAVAILABLE; then all is well."""
    (decode,) = cluster.of_role("decode")
    begun = asyncio.Event()
    cases = make_family(6, 4, 300)
    tasks = [asyncio.create_task(watch(client, case, lambda _: begun.set())) for case in cases]
    await begun.wait()
    decode.kill()
    for history in await asyncio.gather(*tasks):
        assert history.faults() == []
        assert history.refusal is None or isinstance(history.refusal, Unavailable)
    await cluster.until_back(decode)
    assert (await watch(client, cases[0])).faults() == []
    await cluster.until_clean()


async def _counter(cluster: Cluster, name: str) -> int:
    (gateway,) = cluster.of_role("gateway")
    return int((await cluster.debug(gateway, "gateway"))["counters"][name])


# ---------------------------------------------------------------- one scenario


async def _run(
    cluster: Cluster, client: BatonClient, scenario: Scenario, seed: int
) -> list[History]:
    """The histories, each checked; the place must have been reached, and nothing may stay held."""
    armed = [process for role in scenario.roles for process in cluster.of_role(role)]
    for process in armed:
        await cluster.arm(process, scenario.spec)
    try:
        cases = make_family(seed, 6, scenario.max_tokens)
        histories = [await _one(client, cases[0], scenario)]
        histories += await asyncio.gather(*(_one(client, case, scenario) for case in cases[1:]))
        await _until_reached(cluster, armed, scenario)
    finally:
        for process in armed:
            await cluster.arm(process, "")
    for history in histories:
        if not scenario.leaves:
            assert history.faults() == [], f"seed {seed}, {scenario.spec}"
    await cluster.until_clean(15.0)
    return histories


async def _one(client: BatonClient, case: Case, scenario: Scenario) -> History:
    if not scenario.leaves:
        return await watch(client, case)
    task = asyncio.create_task(watch(client, case))
    await asyncio.sleep(0.02 + 0.01 * (len(case.prompt_ids) % 7))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return History(case, 0.0)


def make_family(seed: int, num_cases: int, max_tokens: int) -> list[Case]:
    """Prompts with a common beginning that no other scenario has had."""
    rng = random.Random(seed * 1000 + next(_family))
    prefix = rng.choices(range(VOCAB_SIZE), k=PREFIX_TOKENS)
    return [
        Case(
            (*prefix, *rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 60))),
            max_tokens,
            rng.getrandbits(63) if i % 2 else None,
        )
        for i in range(num_cases)
    ]


async def _until_reached(
    cluster: Cluster, processes: Sequence[Process], scenario: Scenario
) -> None:
    async with asyncio.timeout(5):
        while True:
            pages = [await cluster.debug(process, "failpoints") for process in processes]
            if any(page.get(scenario.place) for page in pages):
                return
            await asyncio.sleep(0.05)
