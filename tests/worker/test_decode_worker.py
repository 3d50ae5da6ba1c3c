"""DecodeWorker over its stream: hand-off, local prefill, fencing, aborts in every phase."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from common import failpoints
from common.types import EngineEvent, ImportReady, StepRecord
from common.wire import worker as wire
from kv_transfer.imports import Imports
from tests.worker.pair import Pair, hand_off, open_pair
from tests.worker.peers import Stream
from tests.worker.rig import (
    AttemptSpan,
    params,
    prompt,
    right_ids,
    state_of,
    until,
)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with open_pair(tmp_path) as made:
        yield made


@pytest.fixture
async def stream(pair: Pair) -> AsyncIterator[Stream]:
    made = Stream(pair.worker)
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


async def test_handed_off_sequences_give_the_right_text(pair: Pair, stream: Stream) -> None:
    prompts = {f"r{i}": prompt(5 + 3 * i, salt=i) for i in range(8)}
    firsts = {name: await hand_off(pair, stream, name, ids) for name, ids in prompts.items()}
    for name, ids in prompts.items():
        assert [firsts[name], *await stream.finished(name)] == right_ids(ids)
    usage = stream.tokens("r7")[-1].usage
    assert (usage.transferred_tokens, usage.computed_tokens) == (26, 0)
    statistics = pair.worker.statistics()
    assert statistics.imports.num_bytes["loopback"] > 0
    assert statistics.finished == 8
    await pair.until_clean()


async def test_one_message_a_step(pair: Pair, stream: Stream) -> None:
    names = [f"r{i}" for i in range(4)]
    for i, name in enumerate(names):
        await hand_off(pair, stream, name, prompt(6, salt=i), max_tokens=40)
    for name in names:
        await stream.finished(name)
    num_tokens = sum(len(stream.ids(name)) for name in names)
    assert num_tokens == 4 * 39
    assert len(stream.of_kind("step_tokens")) < num_tokens
    await pair.until_clean()


async def test_local_prefill(pair: Pair, stream: Stream) -> None:
    ids = prompt(17)
    stream.reserve("r", 1, 6)
    await stream.granted("r")
    stream.start(state_of("r", 1, ids))
    assert await stream.finished("r") == right_ids(ids)
    first, last = stream.tokens("r")[0], stream.tokens("r")[-1]
    assert first.usage.computed_tokens == 17
    assert last.usage.transferred_tokens == 0
    await pair.until_clean()


async def test_cached_blocks_are_not_fetched_again(pair: Pair, stream: Stream) -> None:
    ids = prompt(24)
    first = await hand_off(pair, stream, "one", ids)
    assert [first, *await stream.finished("one")] == right_ids(ids)
    before = pair.worker.statistics().imports.num_blocks["loopback"]
    first = await hand_off(pair, stream, "two", ids)
    assert [first, *await stream.finished("two")] == right_ids(ids)
    assert pair.worker.statistics().imports.num_blocks["loopback"] == before
    assert stream.tokens("two")[-1].usage.cached_tokens == 24
    await pair.until_clean()


@pytest.mark.fault("F28")
async def test_a_corrupt_copy_is_never_used(pair: Pair, stream: Stream) -> None:
    failpoints.arm("transfer.corrupt_block=corrupt@2")
    await hand_off(pair, stream, "r", prompt(30))
    ended = await stream.end_of("r")
    assert ended.reason == wire.END_REASON_KV_LOST
    assert stream.ids("r") == []
    assert pair.worker.statistics().kv_lost == 1
    await pair.until_clean()


@pytest.mark.parametrize(
    "place", ["decode.before_claim", "decode.after_claim", "decode.copy_block",
              "decode.before_settle", "decode.after_settle"]
)  # fmt: skip
@pytest.mark.parametrize("how", ["abort", "stream"])
@pytest.mark.fault("F16", "V17")
async def test_abort_at_each_step_of_a_fetch_leaves_both_ledgers_clean(
    pair: Pair, place: str, how: str
) -> None:
    stream = Stream(pair.worker)
    failpoints.arm(f"{place}=sleep:0.2")
    await hand_off(pair, stream, "r", prompt(30))
    await until(lambda: pair.worker.statistics().engine.num_importing == 1)
    await asyncio.sleep(0.1)
    if how == "abort":
        stream.abort("r")
        await until(lambda: pair.worker.statistics().sequences == 0)
        assert stream.of_kind("ended") == []
    else:
        await stream.close()
        assert pair.worker.statistics().streams == 0
    await pair.until_clean()
    failpoints.arm("")
    if how == "stream":
        stream = Stream(pair.worker)
    first = await hand_off(pair, stream, "again", prompt(30))
    assert [first, *await stream.finished("again")] == right_ids(prompt(30))
    await stream.close()


async def test_a_stream_that_ends_before_the_first_step_of_a_fetch(
    pair: Pair, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    on_events = pair.worker._running.on_events

    def close_first(events: Sequence[EngineEvent], record: StepRecord | None) -> None:
        if any(isinstance(event, ImportReady) for event in events):
            (link,) = pair.worker._links.values()
            loop.call_soon(link.close, "test")
        on_events(events, record)

    monkeypatch.setattr(pair.worker._running, "on_events", close_first)
    await hand_off(pair, stream, "r", prompt(30))
    await until(lambda: stream.ended)
    await pair.until_clean()


async def test_abort_before_room_releases_the_offer(tmp_path: Path) -> None:
    async with open_pair(tmp_path, num_blocks=12, step_delay_ms=5, decode_lookahead=4) as pair:
        stream = Stream(pair.worker)
        stream.reserve("big", 1, 10)
        await stream.granted("big")
        stream.start(state_of("big", 1, prompt(36), sampling=params(11)))
        await until(lambda: stream.ids("big") != [])
        await hand_off(pair, stream, "waits", prompt(20, salt=1))
        await until(lambda: pair.worker.statistics().engine.num_waiting == 1)
        stream.abort("waits")
        await until(lambda: pair.worker.statistics().sequences == 1)
        async with asyncio.timeout(2):
            await pair.exporter.exports.wait_none()
        assert await stream.finished("big") == right_ids(prompt(36), 11)
        await pair.until_clean()
        await stream.close()


async def test_abort_and_end_of_stream_while_decoding(tmp_path: Path) -> None:
    async with open_pair(tmp_path, step_delay_ms=2) as pair:
        mine, other = Stream(pair.worker, "gw-1"), Stream(pair.worker, "gw-2")
        for stream, name in ((mine, "a"), (mine, "b"), (other, "c")):
            await hand_off(pair, stream, name, prompt(9, salt=ord(name)), max_tokens=60)
        await until(lambda: all(s.ids(n) for s, n in ((mine, "a"), (mine, "b"), (other, "c"))))
        mine.abort("a")
        await until(lambda: pair.worker.statistics().sequences == 2)
        await mine.close()
        assert pair.worker.statistics().sequences == 1
        ids = await other.finished("c")
        assert ids == right_ids(prompt(9, salt=ord("c")), 60)[1:]
        await other.close()
        await pair.until_clean()


@pytest.mark.fault("F6")
async def test_messages_of_an_old_attempt_change_nothing(pair: Pair, stream: Stream) -> None:
    ids = prompt(9)
    stream.reserve("r", 1, 4)
    await stream.granted("r")
    stream.reserve("r", 3, 4)
    await stream.granted("r", 3)
    stream.start(state_of("r", 2, ids))
    ended = await stream.end_of("r", 2)
    assert ended.reason == wire.END_REASON_ABORTED
    stream.start(state_of("r", 3, ids, sampling=params(200)))
    await until(lambda: stream.ids("r", 3) != [])
    stream.abort("r", 2)
    stream.start(state_of("r", 3, ids))
    assert await stream.finished("r", 3) == right_ids(ids, 200)
    assert pair.worker.statistics().fenced == 2
    await pair.until_clean()


async def test_start_without_a_promise_is_refused(pair: Pair, stream: Stream) -> None:
    state = state_of("r", 1, prompt(9))
    first, offer = await pair.exporter.prefill(state)
    state.output_ids.append(first)
    stream.start(state, offer)
    assert (await stream.end_of("r")).reason == wire.END_REASON_ABORTED
    await pair.until_clean()


async def test_deadline_ends_promise_and_sequence(tmp_path: Path) -> None:
    async with open_pair(tmp_path, step_delay_ms=5) as pair:
        stream = Stream(pair.worker)
        stream.reserve("held", 1, 4, ms=100)
        await stream.granted("held")
        await until(lambda: bool(stream.of_kind("refused")))
        assert stream.of_kind("refused")[0].refused.reason == "deadline"
        stream.reserve("r", 1, 4)
        await stream.granted("r")
        stream.start(state_of("r", 1, prompt(9), sampling=params(200), remaining_ms=150))
        assert (await stream.end_of("r")).reason == wire.END_REASON_DEADLINE
        await pair.until_clean()
        await stream.close()


async def test_promises_are_bounded_over_all_streams(tmp_path: Path) -> None:
    async with open_pair(tmp_path, num_blocks=16, decode_lookahead=1.25) as pair:
        one, two = Stream(pair.worker, "gw-1"), Stream(pair.worker, "gw-2")
        one.reserve("a", 1, 10)
        await one.granted("a")
        two.reserve("b", 1, 10)
        two.reserve("huge", 1, 17)
        await until(lambda: bool(two.of_kind("refused")))
        assert two.of_kind("refused")[0].refused.reason == "too_large"
        await asyncio.sleep(0.05)
        assert two.of_kind("granted") == []
        await one.close()
        await two.granted("b")
        assert pair.worker.statistics().reservations.promised_blocks == 10
        await two.close()
        await pair.until_clean()


async def test_silence_is_death(pair: Pair) -> None:
    stream = Stream(pair.worker)
    stream.reserve("r", 1, 4)
    await stream.granted("r")
    stream.beat = False
    await until(lambda: stream.ended, 6)
    await pair.until_clean()
    await stream.close()


@pytest.mark.fault("F30")
async def test_an_outbox_that_is_not_drained_closes_its_stream_alone(tmp_path: Path) -> None:
    async with open_pair(tmp_path, outbox_timeout_s=0.4) as pair:
        stuck = pair.worker.stream(_hello_only())
        await anext(stuck)
        good = Stream(pair.worker, "gw-2")
        await until(lambda: pair.worker.statistics().streams == 1, 4)
        good.reserve("r", 1, 4)
        await good.granted("r")
        await stuck.aclose()
        await good.close()


async def _hello_only() -> AsyncIterator[wire.StreamRequest]:
    while True:
        yield wire.StreamRequest(hello=wire.StreamHello(peer_id="gw-1", protocol_version=1))
        await asyncio.sleep(0.3)


async def test_another_protocol_version_is_left(pair: Pair) -> None:
    async def requests() -> AsyncIterator[wire.StreamRequest]:
        yield wire.StreamRequest(hello=wire.StreamHello(peer_id="gw-1", protocol_version=99))
        await asyncio.sleep(60)

    received = [message async for message in pair.worker.stream(requests())]
    assert all(m.WhichOneof("message") in ("hello", "heartbeat") for m in received)


async def test_drain_finishes_what_is_promised_and_hands_the_rest_over(tmp_path: Path) -> None:
    async with open_pair(tmp_path, step_delay_ms=5) as pair:
        stream = Stream(pair.worker)
        stream.reserve("promised", 1, 4)
        await stream.granted("promised")
        await pair.worker.stop_intake()
        assert pair.bus.reports[-1].state == "draining"
        stream.reserve("late", 1, 4)
        await until(lambda: bool(stream.of_kind("refused")))
        assert stream.of_kind("refused")[0].refused.reason == "draining"
        stream.start(state_of("promised", 1, prompt(9), sampling=params(4)))
        async with asyncio.timeout(5):
            await pair.worker.finish()
        await pair.worker.hand_over()
        await until(lambda: stream.ended)
        assert stream.ids("promised") == right_ids(prompt(9), 4)
        await stream.close()


async def test_hand_over_tells_the_gateway(tmp_path: Path) -> None:
    async with open_pair(tmp_path, step_delay_ms=5) as pair:
        stream = Stream(pair.worker)
        await hand_off(pair, stream, "long", prompt(9), max_tokens=200)
        await until(lambda: stream.ids("long") != [])
        await pair.worker.stop_intake()
        await pair.worker.hand_over()
        assert (await stream.end_of("long")).reason == wire.END_REASON_DRAINED
        await until(lambda: stream.ended)
        await pair.until_clean()
        await stream.close()


async def test_a_lease_that_ran_out_is_kv_lost(tmp_path: Path) -> None:
    async with open_pair(tmp_path, lease_s=0.3) as pair:
        stream = Stream(pair.worker)
        stream.reserve("r", 1, 8)
        await stream.granted("r")
        state = state_of("r", 1, prompt(20))
        first, offer = await pair.exporter.prefill(state)
        await pair.exporter.exports.wait_none()
        state.output_ids.append(first)
        stream.start(state, offer)
        assert (await stream.end_of("r")).reason == wire.END_REASON_KV_LOST
        await pair.until_clean()
        await stream.close()


async def test_the_spans_of_a_sequence_hang_under_its_attempt(
    tmp_path: Path, attempt_span: AttemptSpan
) -> None:
    async with open_pair(tmp_path, spans=attempt_span.telemetry, step_delay_ms=2) as pair:
        stream = Stream(pair.worker)
        carrier = dict(attempt_span.carrier)
        await hand_off(pair, stream, "r", prompt(30), carrier=carrier)
        await stream.finished("r")
        await hand_off(pair, stream, "left", prompt(30), max_tokens=200, carrier=carrier)
        await until(lambda: stream.ids("left") != [])
        stream.abort("left")
        await pair.until_clean()
        await stream.close()
    spans = await attempt_span.collect()
    one = ["decode", "decode.queue", "kv.fetch", "decode.run"]
    assert sorted(attempt_span.children("attempt")) == sorted([*one, *one])
    fetch = next(span for span in spans if span.name == "kv.fetch")
    assert fetch.attributes["baton.transport"] == "loopback"
    assert fetch.attributes["baton.transport_reason"] == "loopback: reached"
    assert fetch.attributes["baton.num_bytes"] == 8 * 4 * 64
    assert len(next(span for span in spans if span.name == "decode.run").links) == 2
    assert [s.error for s in spans if s.name == "decode"] == ["", "aborted"]


@pytest.mark.parametrize("error", [OSError("no memory to map it"), asyncio.CancelledError()])
async def test_a_fetch_that_ends_in_any_other_way_is_told_too(
    pair: Pair, stream: Stream, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    async def fetch(*args: object) -> None:
        raise error

    monkeypatch.setattr(Imports, "fetch", fetch)
    await hand_off(pair, stream, "r", prompt(30))
    assert (await stream.end_of("r")).reason == wire.END_REASON_KV_LOST
    await until(lambda: pair.worker.statistics().sequences == 0)
    assert (await pair.decode.counts()).importing == 0
