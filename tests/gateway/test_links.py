"""Links to decode workers: whose fault the end of one is, and whom it harms."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from common.errors import Unavailable
from common.wire import inference
from common.wire import worker as wire
from gateway.admission import Admission, Bounds
from gateway.attempt import Attempt
from gateway.decode_link import Dial
from gateway.decode_pool import DecodePool
from gateway.offers import OfferKeeper
from gateway.registry import WorkerEntry
from gateway.run import Run
from tests.gateway.test_books import make_request, report
from tests.gateway.test_decode_pool import make_pool, until_connected


def started(pool: DecodePool, request_id: str) -> tuple[Run, Attempt]:
    """A run that the worker d1 is working on."""
    run = Run(make_request(request_id), asyncio.get_running_loop().time(), pool.runs.counters)
    pool.runs.add(run)
    attempt = run.new_attempt()
    attempt.link = pool.links["d1"]
    attempt.decode_started = True
    return run, attempt


@pytest.mark.fault("F7")
async def test_all_who_had_begun_wait_once_for_a_decode_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One after the other they would, each for the whole time."""
    monkeypatch.setattr("gateway.decode_pool.RESUME_WAIT_S", 0.4)
    pool, _ = make_pool()
    admission = Admission(Bounds(100, 100_000, 100, 100_000), lambda: 0, lambda: 0.0)
    clock = asyncio.get_running_loop().time

    async def one(number: int) -> None:
        run = Run(make_request(f"r{number}"), clock(), pool.runs.counters)
        run.new_attempt()
        attempt = run.new_attempt()
        patience = pool.patience(run)
        with pytest.raises(Unavailable, match="no decode worker is up"):
            async with admission.turn(run, patience.look):
                await pool.reserve(run, attempt, 2, False, patience)

    async with asyncio.timeout(2.0):
        await asyncio.gather(*(one(number) for number in range(10)))
    assert admission.gate.num_inside == admission.gate.num_waiting == 0


async def test_a_request_that_has_begun_goes_on_when_a_worker_comes_back() -> None:
    pool, registry = make_pool()
    run = Run(make_request(), asyncio.get_running_loop().time(), pool.runs.counters)
    for _ in range(2):
        run.new_attempt()
    waiting = asyncio.create_task(pool._choose(run, False, pool.patience(run)))
    await asyncio.sleep(0.1)
    registry.report(report("d1", role="decode"))
    async with asyncio.timeout(3):
        assert (await waiting).worker_id == "d1"
    await pool.close()


def beating(entry: WorkerEntry) -> Dial:
    """A worker that answers every heartbeat."""

    async def dial(
        requests: AsyncIterator[wire.StreamRequest],
    ) -> AsyncIterator[wire.StreamResponse]:
        async for request in requests:
            if request.HasField("hello"):
                yield wire.StreamResponse(hello=wire.StreamHello(num_blocks=8))
            else:
                yield wire.StreamResponse(heartbeat=wire.Heartbeat())

    return dial


@pytest.mark.fault("F6")
async def test_a_gateway_that_stood_still_holds_it_against_nobody() -> None:
    pool, registry = make_pool(beating)
    registry.report(report("d1", role="decode"))
    await until_connected(pool)
    link = pool.links["d1"]
    link.timeout_s = 2.0
    _, attempt = started(pool, "r")
    await asyncio.sleep(0.1)
    time.sleep(3.0)  # noqa: ASYNC251 - nothing of this process runs meanwhile
    await asyncio.sleep(0.7)
    assert link.connected and attempt.lost is None
    await pool.close()


@pytest.mark.fault("F4", "F22")
async def test_an_engine_that_hangs_is_a_death_whoever_says_so_first() -> None:
    pool, registry = make_pool()
    registry.report(report("d1", role="decode"))
    await until_connected(pool)
    _, attempt = started(pool, "r")
    hung = report("d1", role="decode")
    hung.load.step_age_s = 16.0
    registry.report(hung)
    async with asyncio.timeout(3):
        await attempt.changed.wait()
    assert attempt.lost is not None and attempt.lost.owner_died
    await pool.close()


async def test_a_worker_that_says_good_bye_has_not_died() -> None:
    pool, registry = make_pool()
    registry.report(report("d1", role="decode"))
    await until_connected(pool)
    _, attempt = started(pool, "r")
    gone = report("d1", role="decode")
    gone.state = "gone"
    registry.report(gone)
    async with asyncio.timeout(3):
        await attempt.changed.wait()
    assert attempt.lost is not None and not attempt.lost.counts
    await pool.close()


@pytest.mark.fault("F22")
async def test_tokens_that_cannot_be_read_end_only_their_own_attempt() -> None:
    pool, registry = make_pool()
    registry.report(report("d1", role="decode"))
    await until_connected(pool)
    _, bad = started(pool, "bad")
    good_run, good = started(pool, "good")
    link = pool.links["d1"]
    unknown = wire.SequenceTokens(request_id="bad", attempt=1, token_ids=[1])
    assert 77 not in inference.FinishReason.values()
    unknown.finish_reason = 77  # type: ignore[assignment]
    tokens = wire.SequenceTokens(request_id="good", attempt=1, token_ids=[5])
    link._on_message(wire.StreamResponse(step_tokens=wire.StepTokens(sequences=[unknown, tokens])))
    assert bad.lost is not None and bad.lost.counts and not bad.lost.owner_died
    assert good.lost is None and link.connected
    arrival = good_run.take_arrival()
    assert arrival is not None and arrival.token_ids == (5,)
    await pool.close()


class Exporter:
    """Renews so many times; then the lease is somebody else's."""

    def __init__(self, num_renewals: int) -> None:
        self.num_left = num_renewals
        self.num_calls = 0

    async def renew(self, offer: wire.Offer) -> bool:
        self.num_calls += 1
        self.num_left -= 1
        return self.num_left >= 0

    async def release(self, offer: wire.Offer) -> None: ...

    def keep(self, endpoints: object) -> None: ...


async def test_an_offer_is_renewed_until_it_is_not_ours() -> None:
    exporter = Exporter(num_renewals=1)
    async with OfferKeeper(exporter).kept(wire.Offer(lease_ms=300)):
        await asyncio.sleep(0.7)
    assert exporter.num_calls == 2
