"""A bug that one message, one job or one sequence runs into costs that one alone."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import decode_worker.running
import decode_worker.tokens
import prefill_worker.intake
from common import failpoints
from common.nats_server import NatsServer
from common.wire import worker as wire
from decode_worker.reservations import Reservations
from decode_worker.running import Running
from decode_worker.sequences import SequenceTable
from decode_worker.spans import SequenceSpans
from prefill_worker.spans import JobSpans
from tests.worker.pair import Pair, hand_off, open_pair
from tests.worker.peers import Stream
from tests.worker.rig import params, prompt, right_ids, state_of, until
from tests.worker.setup import Setup, open_setup
from worker.metrics import StepMeter
from worker.rates import PrefillRates
from worker.registration import Registration

Plant = Callable[[object, str], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    """Has one function of a class or module raise the next time that it is called."""
    not_reached: list[str] = []

    def plant(owner: object, name: str) -> None:
        sound = getattr(owner, name)
        not_reached.append(name)

        def buggy(*args: object, **kwargs: object) -> object:
            if name in not_reached:
                not_reached.remove(name)
                raise RuntimeError("a bug")
            return sound(*args, **kwargs)

        monkeypatch.setattr(owner, name, buggy)

    yield plant
    assert not_reached == []


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


# ---------------------------------------------------------------- decode


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with open_pair(tmp_path, lease_s=1.0, step_delay_ms=2) as made:
        yield made


@pytest.fixture
async def stream(pair: Pair) -> AsyncIterator[Stream]:
    """One that a neighbour is decoded on, whose text is checked at the end."""
    made = Stream(pair.worker)
    ids = prompt(9, salt=1)
    first = await hand_off(pair, made, "neighbour", ids, max_tokens=150)
    await until(lambda: made.ids("neighbour") != [])
    yield made
    assert [first, *await made.finished("neighbour")] == right_ids(ids, 150)
    await pair.until_clean()
    await made.close()


async def serves(pair: Pair, stream: Stream) -> None:
    """The same stream takes the next request."""
    first = await hand_off(pair, stream, "next", prompt(30))
    assert [first, *await stream.finished("next")] == right_ids(prompt(30))


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (failpoints, "decode.after_start"),
        (decode_worker.running, "offer_from_proto"),
        (Running, "_refusal"),
        (SequenceTable, "add"),
        (Running, "_tell"),
    ],
)
async def test_a_start_that_meets_a_bug_ends_its_own_sequence(
    pair: Pair, stream: Stream, plant: Plant, owner: object, name: str
) -> None:
    if owner is failpoints:
        failpoints.arm(f"{name}=raise@1")
    else:
        plant(owner, name)
    await hand_off(pair, stream, "bad", prompt(30))
    ended = await stream.end_of("bad")
    assert (ended.reason, ended.detail) == (wire.END_REASON_FAILED, "internal")
    assert pair.worker.statistics().failed == 1
    await serves(pair, stream)
    assert len(stream.of_kind("ended")) == 1


@pytest.mark.parametrize(
    ("owner", "name"), [(failpoints, "decode.before_grant"), (Reservations, "reserve")]
)
async def test_a_reserve_that_meets_a_bug_is_refused(
    pair: Pair, stream: Stream, plant: Plant, owner: object, name: str
) -> None:
    if owner is failpoints:
        failpoints.arm(f"{name}=raise@1")
    else:
        plant(owner, name)
    stream.reserve("bad", 1, 8)
    await until(lambda: bool(stream.of_kind("refused")))
    refused = stream.of_kind("refused")[0].refused
    assert (refused.request_id, refused.attempt, refused.reason) == ("bad", 1, "internal")
    reservations = pair.worker.statistics().reservations
    assert (reservations.promises, reservations.waiting) == (0, 0)
    await serves(pair, stream)


async def test_an_abort_that_meets_a_bug_ends_no_stream(
    pair: Pair, stream: Stream, plant: Plant
) -> None:
    plant(Running, "abort")
    stream.abort("unknown")
    await serves(pair, stream)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (SequenceSpans, "admitted"),
        (Running, "_landed"),
        (SequenceSpans, "tokens"),
        (decode_worker.tokens, "_usage"),
    ],
)
async def test_a_sequence_that_meets_a_bug_gives_its_blocks_back_and_says_nothing_more(
    tmp_path: Path, plant: Plant, owner: object, name: str
) -> None:
    async with open_pair(tmp_path) as pair:
        stream = Stream(pair.worker)
        plant(owner, name)
        await hand_off(pair, stream, "bad", prompt(30))
        assert (await stream.end_of("bad")).reason == wire.END_REASON_FAILED
        await serves(pair, stream)
        assert stream.tokens("bad") == []
        await pair.until_clean()
        await stream.close()


async def test_a_bug_in_the_span_of_a_sequence_that_ends_keeps_no_promise(
    tmp_path: Path, plant: Plant
) -> None:
    async with open_pair(tmp_path, num_blocks=12, step_delay_ms=5, decode_lookahead=4) as pair:
        stream = Stream(pair.worker)
        stream.reserve("big", 1, 10)
        await stream.granted("big")
        stream.start(state_of("big", 1, prompt(36), sampling=params(11)))
        await until(lambda: stream.ids("big") != [])
        await hand_off(pair, stream, "waits", prompt(20, salt=1))
        await until(lambda: pair.worker.statistics().engine.num_waiting == 1)
        plant(SequenceSpans, "end")
        stream.abort("waits")
        assert await stream.finished("big") == right_ids(prompt(36), 11)
        await pair.until_clean()
        await stream.close()


@pytest.mark.parametrize("owner", [StepMeter, PrefillRates])
async def test_a_bug_in_the_figures_of_a_decode_worker_loses_no_token(
    tmp_path: Path, plant: Plant, owner: object
) -> None:
    async with open_pair(tmp_path) as pair:
        stream = Stream(pair.worker)
        plant(owner, "add")
        stream.reserve("r", 1, 6)
        await stream.granted("r")
        stream.start(state_of("r", 1, prompt(17)))
        assert await stream.finished("r") == right_ids(prompt(17))
        await pair.until_clean()
        await stream.close()


# ---------------------------------------------------------------- prefill


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats") / "run") as server:
        yield server


@pytest.fixture
async def setup(nats: NatsServer, tmp_path: Path) -> AsyncIterator[Setup]:
    async with open_setup(nats, tmp_path) as made:
        yield made


async def answers(setup: Setup, request_id: str) -> None:
    ticket = await setup.gateway.ticket(request_id)
    assert list(ticket.result.token_ids) == right_ids(prompt(30), 1)
    setup.release(ticket.result.offer)
    await setup.until_clean()


@pytest.mark.parametrize("name", ["prefill.after_pull", "parse_job"])
async def test_a_pulled_job_that_meets_a_bug_comes_once_and_ends_no_worker(
    setup: Setup, plant: Plant, name: str
) -> None:
    if name in failpoints.FAILPOINTS:
        failpoints.arm(f"{name}=raise@1")
    else:
        plant(prefill_worker.intake, name)
    await setup.gateway.publish(state_of("bad", 1, prompt(9)))
    await setup.gateway.publish(state_of("next", 1, prompt(30)))
    await answers(setup, "next")
    # Acked, so it does not come back after ack_wait.
    await asyncio.sleep(2.5)
    assert [accept.request_id for accept in setup.gateway.accepts] == ["next"]


async def test_a_job_that_was_taken_is_done_whatever_fails_right_after(
    setup: Setup, plant: Plant
) -> None:
    plant(Registration, "changed")
    await setup.gateway.publish(state_of("r", 1, prompt(30)))
    await answers(setup, "r")


async def test_a_bug_between_computing_and_offering_leaves_no_block_leased(
    setup: Setup, plant: Plant
) -> None:
    plant(JobSpans, "sampled")
    await setup.gateway.publish(state_of("bad", 1, prompt(30)))
    await until(lambda: setup.worker.statistics().granted == 1)
    await setup.until_clean()
    await setup.gateway.publish(state_of("next", 1, prompt(30)))
    await answers(setup, "next")


@pytest.mark.parametrize("owner", [StepMeter, PrefillRates])
async def test_a_bug_in_the_figures_of_a_prefill_worker_loses_no_job(
    setup: Setup, plant: Plant, owner: object
) -> None:
    plant(owner, "add")
    await setup.gateway.publish(state_of("r", 1, prompt(30, 0), sampling=params()))
    await answers(setup, "r")
