"""PrefillWorker over a real nats-server, with a small gateway that speaks the real messages."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from common import failpoints
from common.bus import (
    DISCOVER_SUBJECT,
    worker_cancel_subject,
    worker_job_subject,
)
from common.nats_bus import NatsBus
from common.nats_server import NatsServer
from common.wire import worker as wire
from kv_transfer.lease import LeaseVerdict
from tests.worker.peers import FakeGateway
from tests.worker.rig import (
    AttemptSpan,
    params,
    prompt,
    right_ids,
    state_of,
    until,
)
from tests.worker.setup import Setup, open_setup


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats") / "run") as server:
        yield server


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


@pytest.fixture
async def setup(nats: NatsServer, tmp_path: Path) -> AsyncIterator[Setup]:
    async with open_setup(nats, tmp_path) as made:
        yield made


async def test_a_pulled_job_is_asked_for_computed_and_answered(setup: Setup) -> None:
    ids = prompt(30)
    await setup.gateway.publish(state_of("r", 1, ids))
    ticket = await setup.gateway.ticket("r")
    result = ticket.result
    assert list(result.token_ids) == right_ids(ids, 1)
    assert (result.computed_tokens, result.cached_tokens) == (30, 0)
    assert len(result.offer.blocks) == 8
    assert result.offer.num_tokens == 30
    assert len(result.offer.secret) == 16
    accept = setup.gateway.accepts[0]
    assert (accept.worker_id, accept.epoch) == ("prefill-1", 11)
    # What is known of the engine's thread comes a moment later.
    await until(lambda: setup.worker.statistics().engine.blocks.leased == 8)
    assert setup.release(result.offer) is LeaseVerdict.OK
    await setup.until_clean()


async def test_a_request_that_ends_with_its_first_token_has_no_offer(setup: Setup) -> None:
    await setup.gateway.publish(state_of("r", 1, prompt(9), sampling=params(1)))
    result = (await setup.gateway.ticket("r")).result
    assert not result.HasField("offer")
    assert result.finish_reason == 2
    await setup.until_clean()


async def test_prompt_logprobs_without_a_token(setup: Setup) -> None:
    sampling = params(0, prompt_logprobs=2)
    await setup.gateway.publish(state_of("r", 1, prompt(9), sampling=sampling))
    result = (await setup.gateway.ticket("r")).result
    assert list(result.token_ids) == []
    assert len(result.prompt_logprobs) == 9
    assert not result.prompt_logprobs[0].HasField("logprob")
    await setup.until_clean()


async def test_prompt_logprobs_that_no_message_can_hold(setup: Setup, monkeypatch) -> None:
    monkeypatch.setattr("prefill_worker.ticket.MAX_TICKET_BYTES", 500)
    sampling = params(4, prompt_logprobs=20)
    await setup.gateway.publish(state_of("r", 1, prompt(30), sampling=sampling))
    assert (await setup.gateway.ticket("r")).failure.reason == "message_too_large"
    await setup.until_clean()


async def test_a_resumed_job_goes_on_where_it_was(setup: Setup) -> None:
    ids = prompt(9)
    right = right_ids(ids, 8)
    await setup.gateway.publish(state_of("r", 2, ids, right[:3]))
    ticket = await setup.gateway.ticket("r", 2)
    assert list(ticket.result.token_ids) == right[3:4]
    assert ticket.result.offer.num_tokens == 12
    setup.release(ticket.result.offer)
    await setup.until_clean()


async def test_a_refused_job_is_forgotten(setup: Setup) -> None:
    setup.gateway.grant = False
    await setup.gateway.publish(state_of("r", 1, prompt(9)))
    await until(lambda: setup.worker.statistics().refused == 1)
    setup.gateway.grant = True
    # Acked, so it does not come back after ack_wait.
    await asyncio.sleep(2.5)
    assert len(setup.gateway.accepts) == 1
    assert setup.gateway.tickets == []
    await setup.until_clean()


async def test_an_unanswered_accept_is_repeated_with_the_same_content(setup: Setup) -> None:
    setup.gateway.mute_accepts = 1
    await setup.gateway.publish(state_of("r", 1, prompt(9)))
    ticket = await setup.gateway.ticket("r")
    assert len(setup.gateway.accepts) >= 2
    assert all(accept == setup.gateway.accepts[0] for accept in setup.gateway.accepts)
    setup.release(ticket.result.offer)
    await setup.until_clean()


async def test_a_gateway_that_stands_still_holds_up_no_other(
    nats: NatsServer, tmp_path: Path
) -> None:
    async with open_setup(nats, tmp_path, max_num_batched_tokens=64) as setup:
        frozen = FakeGateway(setup.bus, "gw-frozen")
        frozen.mute_accepts = 1000
        await frozen.start()
        await frozen.publish(state_of("held", 1, prompt(200)))
        await until(lambda: bool(frozen.accepts))
        await setup.gateway.publish(state_of("r", 1, prompt(9)))
        setup.release((await setup.gateway.ticket("r")).result.offer)
        assert setup.worker.statistics().refused == 0, "still asked for"
        frozen.mute_accepts = 0
        held = await frozen.ticket("held")
        assert list(held.result.token_ids) == right_ids(prompt(200), 1)
        setup.release(held.result.offer)
        await setup.until_clean()


async def test_an_unanswered_ticket_is_repeated_with_the_same_content(setup: Setup) -> None:
    setup.gateway.mute_tickets = 1
    await setup.gateway.publish(state_of("r", 1, prompt(9)))
    await until(lambda: len(setup.gateway.tickets) == 2)
    assert setup.gateway.tickets[0] == setup.gateway.tickets[1]
    setup.release(setup.gateway.tickets[0].result.offer)
    await setup.until_clean()


async def test_a_ticket_that_is_not_taken_releases_the_offer(setup: Setup) -> None:
    setup.gateway.take = False
    await setup.gateway.publish(state_of("r", 1, prompt(30)))
    await setup.gateway.ticket("r")
    async with asyncio.timeout(2):
        await setup.worker.serve_offers()
    await setup.until_clean()
    assert setup.worker.statistics().dropped == 1


async def test_a_job_of_a_gateway_that_is_gone(setup: Setup) -> None:
    gone = FakeGateway(setup.bus, "gw-gone")
    await until(lambda: setup.bus.connected_for_s > 1.1)
    await gone.publish(state_of("r", 1, prompt(9)))
    await until(lambda: setup.worker.statistics().refused == 1, 4)
    await setup.until_clean()


async def test_a_chosen_job_is_answered_at_once(setup: Setup) -> None:
    subject = worker_job_subject(setup.worker_id)
    data = setup.gateway.job(state_of("r", 1, prompt(9)))
    reply = wire.TargetedJobReply.FromString(await setup.bus.request(subject, data, 0.5))
    assert reply.accepted
    ticket = await setup.gateway.ticket("r")
    setup.release(ticket.result.offer)
    await setup.until_clean()


async def test_one_job_is_held_beside_the_one_that_fills_the_steps(
    nats: NatsServer, tmp_path: Path
) -> None:
    async with open_setup(
        nats,
        tmp_path,
        max_num_batched_tokens=8,
        max_num_partial_prefills=1,
        step_delay_ms=40,
        enable_prefix_caching=False,
    ) as setup:
        for i in range(4):
            await setup.gateway.publish(state_of(f"r{i}", 1, prompt(80, salt=i)))
        await until(lambda: len(setup.gateway.accepts) == 2)
        await asyncio.sleep(0.15)
        assert len(setup.gateway.accepts) == 2
        assert setup.worker.statistics().free_slots == 0
        subject = worker_job_subject(setup.worker_id)
        data = setup.gateway.job(state_of("chosen", 1, prompt(9)))
        reply = wire.TargetedJobReply.FromString(await setup.bus.request(subject, data, 0.5))
        assert not reply.accepted
        for i in range(4):
            ticket = await setup.gateway.ticket(f"r{i}")
            assert list(ticket.result.token_ids) == right_ids(prompt(80, salt=i), 1)
            setup.release(ticket.result.offer)
        await setup.until_clean()


async def test_small_jobs_share_a_step(nats: NatsServer, tmp_path: Path) -> None:
    async with open_setup(nats, tmp_path, step_delay_ms=50) as setup:
        for i in range(6):
            await setup.gateway.publish(state_of(f"r{i}", 1, prompt(9, salt=i)))
        for i in range(6):
            setup.release((await setup.gateway.ticket(f"r{i}")).result.offer)
        assert setup.worker.statistics().engine.num_steps < 6
        await setup.until_clean()


@pytest.mark.parametrize(
    "place",
    ["prefill.before_accept", "prefill.after_accept", "prefill.chunk", "prefill.after_compute",
     "prefill.before_ticket", "prefill.after_ticket"],
)  # fmt: skip
@pytest.mark.fault("F15")
async def test_cancel_in_each_phase_leaves_nothing(setup: Setup, place: str) -> None:
    failpoints.arm(f"{place}=sleep:0.3")
    setup.gateway.take = False
    await setup.gateway.publish(state_of("r", 1, prompt(30)))
    await until(lambda: setup.worker.statistics().jobs == 1)
    await asyncio.sleep(0.1)
    cancel = wire.PrefillCancel(request_id="r", attempt=1).SerializeToString()
    await setup.bus.publish(worker_cancel_subject(setup.worker_id), cancel)
    await setup.until_clean()
    failpoints.arm("")
    setup.gateway.take = True
    await setup.gateway.publish(state_of("again", 1, prompt(30)))
    ticket = await setup.gateway.ticket("again")
    assert list(ticket.result.token_ids) == right_ids(prompt(30), 1)
    setup.release(ticket.result.offer)
    await setup.until_clean()


async def test_cancel_in_mid_prompt(nats: NatsServer, tmp_path: Path) -> None:
    async with open_setup(nats, tmp_path, max_num_batched_tokens=4, step_delay_ms=20) as setup:
        await setup.gateway.publish(state_of("r", 1, prompt(200)))
        await until(lambda: setup.worker.statistics().engine.num_steps > 2)
        cancel = wire.PrefillCancel(request_id="r", attempt=1).SerializeToString()
        await setup.bus.publish(worker_cancel_subject(setup.worker_id), cancel)
        await until(lambda: setup.worker.statistics().jobs == 0, 1)
        await setup.until_clean()
        assert setup.gateway.tickets == []


async def test_the_deadline_ends_a_job(nats: NatsServer, tmp_path: Path) -> None:
    async with open_setup(nats, tmp_path, max_num_batched_tokens=4, step_delay_ms=20) as setup:
        setup.gateway.remaining_ms = 100
        await setup.gateway.publish(state_of("r", 1, prompt(200)))
        assert (await setup.gateway.ticket("r")).failure.reason == "deadline"
        await setup.until_clean()


@pytest.mark.fault("F19")
async def test_a_prompt_that_never_fits_fails(setup: Setup) -> None:
    await setup.gateway.publish(state_of("r", 1, prompt(300)))
    assert (await setup.gateway.ticket("r")).failure.reason == "too_large"
    await setup.until_clean()


@pytest.mark.fault("F33")
async def test_garbage_is_dropped(setup: Setup) -> None:
    await setup.bus.publish_job(b"\xff\xffnot a job", "x:1")
    await setup.bus.publish_job(b"", "x:2")
    await until(lambda: setup.worker.statistics().malformed == 2)
    await setup.gateway.publish(state_of("r", 1, prompt(9)))
    setup.release((await setup.gateway.ticket("r")).result.offer)
    await setup.until_clean()


async def test_reports_say_what_is_owned(setup: Setup) -> None:
    failpoints.arm("prefill.before_ticket=sleep:0.5")
    await setup.gateway.publish(state_of("r", 1, prompt(9)))
    await until(lambda: any(r.load.owned for r in setup.reports))
    owned = next(r for r in setup.reports if r.load.owned).load.owned[0]
    assert (owned.request_id, owned.attempt) == ("r", 1)
    report = setup.reports[-1]
    assert (report.state, report.role, report.epoch) == ("ready", "prefill", 11)
    assert report.load.blocks.total == 64
    setup.release((await setup.gateway.ticket("r")).result.offer)
    await setup.until_clean()
    await until(lambda: not setup.reports[-1].load.owned)


async def test_discover_is_answered_at_once_and_each_second_without(setup: Setup) -> None:
    await asyncio.sleep(0.3)
    setup.reports.clear()
    await setup.bus.publish(DISCOVER_SUBJECT, b"")
    await until(lambda: bool(setup.reports), 0.4)
    setup.reports.clear()
    await until(lambda: bool(setup.reports), 1.5)


async def test_drain_finishes_owned_jobs_and_takes_no_more(
    nats: NatsServer, tmp_path: Path
) -> None:
    async with open_setup(nats, tmp_path, max_num_batched_tokens=8, step_delay_ms=10) as setup:
        await setup.gateway.publish(state_of("r", 1, prompt(80)))
        await until(lambda: setup.worker.statistics().granted == 1)
        await setup.worker.stop_intake()
        await setup.gateway.publish(state_of("late", 1, prompt(9)))
        await setup.worker.finish_jobs()
        ticket = await setup.gateway.ticket("r")
        assert list(ticket.result.token_ids) == right_ids(prompt(80), 1)
        await until(lambda: setup.reports[-1].state == "draining")
        setup.release(ticket.result.offer)
        await setup.worker.serve_offers()
        assert [a.request_id for a in setup.gateway.accepts] == ["r"]
        other = await NatsBus.connect(nats.url, nats.credentials_file("prefill"), "prefill-2")
        job = await other.fetch_job(3)
        assert job is not None
        await job.ack()
        await other.close()


async def test_drain_hands_back_what_is_left(nats: NatsServer, tmp_path: Path) -> None:
    async with open_setup(nats, tmp_path, max_num_batched_tokens=4, step_delay_ms=20) as setup:
        await setup.gateway.publish(state_of("r", 1, prompt(200)))
        await until(lambda: setup.worker.statistics().granted == 1)
        await setup.worker.stop_intake()
        await setup.worker.hand_back_jobs()
        assert (await setup.gateway.ticket("r")).failure.reason == "drained"
        await setup.until_clean()


async def test_the_spans_of_a_job_hang_under_its_attempt(
    nats: NatsServer, tmp_path: Path, attempt_span: AttemptSpan
) -> None:
    async with open_setup(
        nats, tmp_path, spans=attempt_span.telemetry, max_num_batched_tokens=16
    ) as setup:
        state = state_of("r", 1, prompt(30))
        state.trace_context.update(attempt_span.carrier)
        await setup.gateway.publish(state)
        setup.release((await setup.gateway.ticket("r")).result.offer)
        await setup.until_clean()
    spans = await attempt_span.collect()
    assert attempt_span.children("attempt") == [
        "prefill",
        "prefill.queue",
        "prefill.chunk",
        "prefill.chunk",
        "kv.offer",
        "prefill.ticket",
    ]
    assert all(span.links for span in spans if span.name == "prefill.chunk")
    assert all(span.status != "error" for span in spans)
