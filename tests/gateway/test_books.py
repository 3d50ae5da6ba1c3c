"""The gateway's records: attempts fenced, indices de-duplicated, grants given once (I1, I5)."""

import asyncio

import pytest

from common.bus import BusError
from common.errors import Unavailable
from common.types import SamplingParams
from common.wire import worker as wire
from gateway.attempt import AttemptLost
from gateway.prefill_dispatch import PrefillDispatch
from gateway.prefix_index import PrefixIndex
from gateway.registry import WorkerRegistry
from gateway.request import Request
from gateway.router import Router
from gateway.run import Arrival, Counters, Run, Runs


def make_request(request_id: str = "r", prompt_ids: tuple[int, ...] = (1, 2, 3)) -> Request:
    params = SamplingParams(max_tokens=8, seed=1)
    return Request(request_id, "", prompt_ids, params, timeout_s=10.0)


def make_run() -> tuple[Run, Counters]:
    counters = Counters()
    run = Run(make_request(), now_s=0.0, counters=counters)
    run.new_attempt()
    return run, counters


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_registry(clock: Clock) -> tuple[WorkerRegistry, list[str], list[tuple[str, int]]]:
    left: list[str] = []
    orphans: list[tuple[str, int]] = []
    registry = WorkerRegistry(
        3.0,
        clock,
        on_join=lambda entry: None,
        on_leave=lambda worker_id, died: left.append(worker_id),
        on_orphan=lambda request_id, attempt: orphans.append((request_id, attempt)),
    )
    return registry, left, orphans


def report(
    worker_id: str = "p1", role: str = "prefill", epoch: int = 1, **layout: object
) -> wire.WorkerReport:
    fields = {"num_layers": 2, "block_size": 16, "dtype": "float32", **layout}
    return wire.WorkerReport(
        worker_id=worker_id,
        role=role,
        epoch=epoch,
        protocol_version=1,
        model=wire.ModelDescription(fingerprint="f", vocab_size=10, max_model_len=100),
        layout=wire.KVLayout(**fields),
        state="ready",
        load=wire.WorkerLoad(free_slots=1),
    )


@pytest.mark.fault("F5")
async def test_indices_already_had_are_dropped_and_counted() -> None:
    run, counters = make_run()
    run.receive(Arrival(0, (5, 6), ()))
    run.receive(Arrival(1, (6, 7, 8), ()))
    assert run.output_ids == [5, 6, 7, 8]
    assert run.take_arrival() == Arrival(0, (5, 6, 7, 8))
    assert counters.duplicates == 1


@pytest.mark.fault("F5")
async def test_a_gap_in_the_indices_ends_the_attempt() -> None:
    run, _ = make_run()
    run.receive(Arrival(1, (5,), ()))
    with pytest.raises(AttemptLost, match="failed"):
        await run.wait_change()
    assert run.output_ids == []


async def test_tokens_that_came_before_a_loss_are_delivered_first() -> None:
    run, _ = make_run()
    assert run.attempt is not None
    run.receive(Arrival(0, (5,), ()))
    run.attempt.lose(AttemptLost("worker_lost", owner_died=True))
    await run.wait_change()
    assert run.take_arrival() == Arrival(0, (5,))
    with pytest.raises(AttemptLost, match="worker_lost"):
        await run.wait_change()


@pytest.mark.fault("F6")
async def test_an_older_attempt_is_fenced_and_counted() -> None:
    run, counters = make_run()
    run.new_attempt()
    assert run.current(1) is None
    assert run.current(2) is run.attempt
    assert counters.fenced == 1


def dispatch_over(bus: object, clock: Clock) -> tuple[PrefillDispatch, Runs, WorkerRegistry]:
    registry, _, _ = make_registry(clock)
    runs = Runs()
    router = Router("auto", registry, PrefixIndex(), seed="")
    dispatch = PrefillDispatch(bus, "gw", runs, registry, router)  # type: ignore[arg-type]
    return dispatch, runs, registry


def make_dispatch(clock: Clock) -> tuple[PrefillDispatch, Runs, WorkerRegistry]:
    """Accept and ticket use no I/O."""
    return dispatch_over(None, clock)


def ask(worker_id: str = "p1", attempt: int = 1, epoch: int = 1) -> wire.AcceptRequest:
    return wire.AcceptRequest(request_id="r", attempt=attempt, worker_id=worker_id, epoch=epoch)


@pytest.mark.fault("F21")
async def test_an_attempt_is_granted_once_and_to_the_same_worker_again() -> None:
    dispatch, runs, _ = make_dispatch(Clock())
    run = Run(make_request(), 0.0, runs.counters)
    runs.add(run)
    run.new_attempt()
    assert dispatch.accept(ask("p1")).granted
    assert dispatch.accept(ask("p1")).granted
    assert dispatch.accept(ask("p2")).reason == "owned"
    assert dispatch.accept(ask("p1", epoch=2)).reason == "owned"
    run.new_attempt()
    assert dispatch.accept(ask("p1", attempt=1)).reason == "stale_attempt"
    assert dispatch.accept(ask("p2", attempt=2)).granted
    runs.remove(run)
    assert dispatch.accept(ask("p2", attempt=2)).reason == "unknown"


async def test_only_the_owner_of_the_current_attempt_has_its_ticket_taken() -> None:
    dispatch, runs, _ = make_dispatch(Clock())
    run = Run(make_request(), 0.0, runs.counters)
    runs.add(run)
    run.new_attempt()

    def ticket(worker_id: str, attempt: int = 1) -> bool:
        return dispatch.ticket(
            wire.TicketRequest(request_id="r", attempt=attempt, worker_id=worker_id, epoch=1)
        )

    assert not ticket("p1")
    assert dispatch.accept(ask("p1")).granted
    assert not ticket("p2")
    assert ticket("p1")
    assert ticket("p1")
    run.new_attempt()
    assert not ticket("p1")
    assert runs.counters.fenced == 3


@pytest.mark.fault("F12")
def test_silence_ends_a_worker_unless_our_own_link_was_down() -> None:
    clock = Clock()
    registry, left, orphans = make_registry(clock)
    registry.report(report())
    registry.granted("r", 1, "p1", num_tokens=3)
    clock.now = 2.0
    registry.pause()
    clock.now = 60.0
    registry.expire(lambda worker_id: False)
    assert left == []
    registry.resume()
    registry.expire(lambda worker_id: False)
    assert left == []
    clock.now = 61.5
    registry.expire(lambda worker_id: False)
    assert left == ["p1"]
    assert orphans == [("r", 1)]


@pytest.mark.fault("F9")
def test_silence_of_all_is_that_of_nats_while_a_stream_lives() -> None:
    clock = Clock()
    registry, left, _ = make_registry(clock)
    registry.report(report())
    registry.report(report("d1", role="decode"))
    clock.now = 3.5
    registry.expire(lambda worker_id: worker_id == "d1")
    assert left == []
    registry.report(report("d1", role="decode"))
    registry.expire(lambda worker_id: worker_id == "d1")
    assert left == ["p1"]


@pytest.mark.fault("F6")
def test_a_standstill_of_our_own_is_no_silence_of_others() -> None:
    clock = Clock()
    registry, left, _ = make_registry(clock)
    registry.report(report())
    clock.now = 6.0
    registry.excuse(4.0)
    registry.expire(lambda worker_id: False)
    assert left == []
    clock.now = 7.5
    registry.expire(lambda worker_id: False)
    assert left == ["p1"]


def test_granted_work_missing_in_two_reports_in_a_row_has_no_owner() -> None:
    clock = Clock()
    registry, _, orphans = make_registry(clock)
    registry.report(report())
    registry.granted("r", 1, "p1", num_tokens=3)
    for clock.now in (0.1, 0.2, 2.9):
        registry.report(report())
    assert orphans == [], "those may be older than the grant"
    clock.now = 3.0
    owned = report()
    owned.load.owned.add(request_id="r", attempt=1)
    for message in (report(), owned, report()):
        registry.report(message)
    assert orphans == []
    registry.report(report())
    assert orphans == [("r", 1)]


@pytest.mark.fault("F29")
def test_a_worker_that_cannot_be_paired_is_refused_with_the_field() -> None:
    registry, left, _ = make_registry(Clock())
    registry.report(report("p1"))
    registry.report(report("d1", role="decode", block_size=32))
    assert list(registry.entries) == ["p1"]
    role, mismatch, _ = registry.refused["d1"]
    assert (role, mismatch.field, mismatch.expected, mismatch.actual) == (
        "decode",
        "layout.block_size",
        "16",
        "32",
    )
    registry.report(report("d1", role="decode"))
    assert set(registry.entries) == {"p1", "d1"}
    assert left == []


def test_a_report_of_an_older_epoch_is_ignored_and_a_newer_one_ends_the_old_life() -> None:
    registry, left, orphans = make_registry(Clock())
    registry.report(report(epoch=2))
    registry.granted("r", 1, "p1", num_tokens=3)
    registry.report(report(epoch=1))
    assert registry.entries["p1"].report.epoch == 2
    registry.report(report(epoch=3))
    assert (left, orphans) == (["p1"], [("r", 1)])


def test_a_worker_whose_engine_hangs_is_as_good_as_gone() -> None:
    registry, left, orphans = make_registry(Clock())
    registry.report(report())
    registry.granted("r", 1, "p1", num_tokens=3)
    hung = report()
    hung.load.owned.add(request_id="r", attempt=1)
    hung.load.step_age_s = 14.0
    registry.report(hung)
    assert (left, orphans) == ([], [])
    hung.load.step_age_s = 16.0
    registry.report(hung)
    assert (left, orphans) == (["p1"], [("r", 1)])
    registry.report(hung)
    assert registry.entries == {}


class BrokenBus:
    """A bus whose every call fails as a server's odd answer does."""

    connected = True
    connected_for_s = 60.0

    async def publish_job(self, *args: object) -> None:
        raise BusError("NATS: insufficient resources")

    async def request(self, *args: object) -> bytes:
        raise BusError("NATS: insufficient resources")


@pytest.mark.fault("F11")
async def test_any_trouble_of_the_bus_is_a_stall_and_no_error_of_the_request() -> None:
    dispatch, runs, _ = dispatch_over(BrokenBus(), Clock())
    run = Run(make_request(), 0.0, runs.counters)
    with pytest.raises(AttemptLost, match="nats_down"):
        await dispatch.prefill(run, run.new_attempt())
    assert dispatch.num_unaccepted == 0


class SilentBus(BrokenBus):
    async def publish_job(self, *args: object) -> None:
        return


async def test_all_who_wait_for_a_slot_wait_once_for_workers_that_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.prefill_dispatch.PATIENCE_S", 0.3)
    monkeypatch.setattr("gateway.prefill_dispatch._POLL_S", 0.05)
    dispatch, runs, _ = dispatch_over(SilentBus(), Clock())

    async def one() -> None:
        run = Run(make_request(), 0.0, runs.counters)
        with pytest.raises(Unavailable, match="no prefill worker"):
            await dispatch.prefill(run, run.new_attempt())

    async with asyncio.timeout(1.5):
        await asyncio.gather(*(one() for _ in range(10)))
    assert dispatch.num_unaccepted == 0


async def test_a_lost_attempt_does_not_wait_for_its_slot() -> None:
    dispatch, runs, _ = dispatch_over(SilentBus(), Clock())
    first, second = (Run(make_request(), 0.0, runs.counters) for _ in range(2))
    holding = asyncio.create_task(dispatch.prefill(first, first.new_attempt()))
    await asyncio.sleep(0)
    attempt = second.new_attempt()
    asyncio.get_running_loop().call_later(0.01, attempt.lose, AttemptLost("worker_lost"))
    async with asyncio.timeout(2):
        with pytest.raises(AttemptLost, match="worker_lost"):
            await dispatch.prefill(second, attempt)
    assert dispatch.num_unaccepted == 1
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    assert dispatch.num_unaccepted == 0
