"""The prefill worker: owns jobs one by one, computes their prompts, hands over their KV.

The life of a job here:

1. It is pulled from the shared queue, or sent by name (intake.py); either takes a slot.
2. *Asked for*: the gateway grants each attempt once, to the first worker that asks, with what is
   left of its time. Refused or no answer: forgotten. Either way the delivery is acked at once.
3. *Computed*: the engine runs the prompt in chunks and samples the first token.
4. *Offered*: the prompt's blocks go under a lease; the engine holds them until the lease ends.
5. *Answered* with a ticket. Not taken, or no answer: the offer is released. Whatever ended the job
   before (failure, deadline, drain) is answered with a ticket too; a cancelled one with nothing.

From 2 to 5 the reports list the attempt as owned: when it is missing, the gateway has it done
again.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial

from google.protobuf.message import DecodeError

from common import failpoints
from common.bus import Bus, BusError, accept_subject, ticket_subject
from common.config import PrefillSettings
from common.telemetry import Telemetry
from common.types import (
    EngineEvent,
    RequestId,
    SequenceFailed,
    SequenceId,
    SequenceOutput,
    StepRecord,
)
from common.wire import worker as wire
from engine.engine import Engine
from kv_transfer.exports import Exports
from kv_transfer.lease import LeaseEnd, LeaseKey
from prefill_worker.intake import Ack, Intake
from prefill_worker.job import Job, JobEnd, Outcome
from prefill_worker.protocol import ask
from prefill_worker.slots import Slots
from prefill_worker.spans import JobSpans
from prefill_worker.statistics import Counters, PrefillStatistics
from prefill_worker.ticket import failure_ticket, success_ticket
from worker.registration import Registration
from worker.report import WorkerFacts, WorkerState, make_load, make_report
from worker.runtime import MakeRuntime
from worker.snapshot import EngineSnapshot
from worker.spans import StepSpans
from worker.tasks import Tasks

log = logging.getLogger(__name__)


class PrefillWorker:
    """Everything but the process around it; made and used inside the running event loop."""

    def __init__(
        self,
        facts: WorkerFacts,
        settings: PrefillSettings,
        bus: Bus,
        exports: Exports,
        make_runtime: MakeRuntime,
        telemetry: Telemetry,
    ) -> None:
        self._facts = facts
        self._bus = bus
        self._exports = exports
        self._telemetry = telemetry
        self._runtime = make_runtime(self._on_events)
        self._snapshot = EngineSnapshot(self._runtime, self._changed)
        self._registration = Registration(bus, facts.identity.worker_id, self.describe)
        self._intake = Intake(bus, facts.identity.worker_id, self)
        self._slots = Slots(settings.max_num_seqs, settings.max_num_batched_tokens)
        self._steps = StepSpans(telemetry)
        self._tasks = Tasks()
        self._jobs: dict[tuple[RequestId, int], Job] = {}
        self._by_seq: dict[SequenceId, Job] = {}
        self._spans: dict[SequenceId, JobSpans] = {}
        self._counters = Counters()
        self._state = WorkerState.STARTING

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        await self._runtime.start()
        await self._snapshot.start()
        await self._exports.start()
        self._state = WorkerState.READY

    async def run(self) -> None:
        """Takes jobs and reports, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._snapshot.run(), name="snapshot")
            group.create_task(self._intake.run(), name="intake")
            group.create_task(self._registration.run(), name="registration")

    async def stop_intake(self) -> None:
        self._state = WorkerState.DRAINING
        self._intake.stop()
        await self._registration.report()

    async def finish_jobs(self) -> None:
        await self._tasks.wait_idle()

    async def hand_back_jobs(self) -> None:
        """The gateway has them done elsewhere."""
        for job in self._jobs.values():
            job.end(JobEnd.DRAINED)
        await self._tasks.wait_idle()

    async def serve_offers(self) -> None:
        await self._exports.wait_none()

    async def leave(self) -> None:
        self._state = WorkerState.GONE
        await self._registration.report()

    async def stop(self) -> None:
        """Ends what still runs. The bus, the pool and telemetry stay the caller's."""
        await self._tasks.cancel()
        await self._exports.close()
        await self._runtime.stop()

    # ------------------------------------------------------------ what others see

    def describe(self) -> wire.WorkerReport:
        load = make_load(
            self._snapshot.current,
            self._runtime.step_age_s(),
            owned=self._jobs,
            bytes_moved=self._exports.statistics().num_bytes,
            free_slots=int(self.has_free_slot),
        )
        return make_report(self._facts, self._state, load)

    def statistics(self) -> PrefillStatistics:
        return PrefillStatistics(
            state=self._state,
            jobs=len(self._jobs),
            free_slots=int(self.has_free_slot),
            malformed=self._intake.num_malformed,
            engine=self._snapshot.current,
            exports=self._exports.statistics(),
            **asdict(self._counters),
        )

    # ------------------------------------------------------------ for the intake

    @property
    def has_free_slot(self) -> bool:
        blocks = self._snapshot.current.blocks
        ready = self._state is WorkerState.READY
        return ready and self._slots.is_free(blocks.free + blocks.cached)

    def knows(self, key: tuple[RequestId, int]) -> bool:
        return key in self._jobs

    def take(self, job: Job, ack: Ack) -> None:
        num_blocks = job.spec.num_tokens // self._facts.layout.block_size + 2
        self._slots.take(job.key, job.spec.num_tokens, num_blocks)
        self._jobs[job.key] = job
        self._intake.slot_changed()
        self._tasks.spawn(self._serve(job, ack), f"job {job.spec.request_id}")

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        for job in self._jobs.values():
            if job.spec.request_id == request_id and job.spec.attempt <= attempt:
                job.cancelled = True
                job.end(JobEnd.CANCELLED)
                self._release(job)

    # ------------------------------------------------------------ one job

    async def _serve(self, job: Job, ack: Ack) -> None:
        loop = asyncio.get_running_loop()
        try:
            remaining_s = await self._ask_for(job)
            with suppress(BusError):
                await ack()
            if remaining_s is None:
                return
            self._changed()
            spans = JobSpans(self._telemetry, self._steps, job)
            self._spans[job.spec.seq_id] = spans
            error: str | None = "interrupted"
            try:
                error = await self._work(job, spans, loop.time() + remaining_s)
            finally:
                spans.end(error)
        finally:
            self._forget(job)

    async def _ask_for(self, job: Job) -> float | None:
        """Seconds that the request has left, or None where the job is not ours."""
        await failpoints.hit_async("prefill.before_accept")
        request = wire.AcceptRequest(
            request_id=job.spec.request_id,
            attempt=job.spec.attempt,
            worker_id=self._facts.identity.worker_id,
            epoch=self._facts.identity.epoch,
        )
        subject = accept_subject(job.gateway_id)
        data = await ask(self._bus, subject, request.SerializeToString(), job.carrier)
        reply = _parse_accept(data)
        if reply is None or not reply.granted:
            self._counters.refused += 1
            return None
        self._counters.granted += 1
        await failpoints.hit_async("prefill.after_accept")
        return reply.remaining_ms / 1000

    async def _work(self, job: Job, spans: JobSpans, deadline_s: float) -> str | None:
        """Computes, offers, answers. Returns the error that ends the span, None for none."""
        outcome = await self._compute(job, deadline_s)
        if isinstance(outcome, SequenceOutput):
            spans.sampled(outcome.counts.cached)
            await failpoints.hit_async("prefill.after_compute")
            if outcome.held:
                await self._offer(job, outcome, spans)
        if job.cancelled:
            self._release(job)
            self._counters.cancelled += 1
            return JobEnd.CANCELLED
        with spans.ticket():
            return await self._answer(job, outcome)

    async def _compute(self, job: Job, deadline_s: float) -> Outcome:
        """The engine's result, or what came first. Leaves nothing of a job that ended otherwise."""
        if job.outcome.done():
            return job.outcome.result()
        loop = asyncio.get_running_loop()
        self._by_seq[job.spec.seq_id] = job
        spec = job.spec
        try:
            await self._runtime.call(lambda engine: engine.add(spec))
            self._slots.added(job.key, loop.time())
            async with asyncio.timeout_at(deadline_s):
                await asyncio.wait((job.outcome,))
        except TimeoutError:
            job.end(JobEnd.DEADLINE)
        finally:
            outcome = job.outcome.result() if job.outcome.done() else JobEnd.CANCELLED
            if not isinstance(outcome, SequenceOutput):
                self._runtime.post(lambda engine: engine.abort(spec.seq_id))
        return outcome

    async def _offer(self, job: Job, output: SequenceOutput, spans: JobSpans) -> None:
        """Puts the prompt's blocks under a lease, whose end gives them back to the engine."""
        spec = job.spec
        num_bytes = len(output.held) * self._facts.layout.block_bytes

        def give_back(_: LeaseEnd | None) -> None:
            self._runtime.post(lambda engine: engine.release_lease(spec.seq_id))
            self._snapshot.refresh()

        with spans.offer(len(output.held), num_bytes):
            try:
                job.offer = await self._exports.offer(
                    output.held, spec.num_tokens, spec.attempt, give_back
                )
            finally:
                if job.offer is None:
                    give_back(None)

    async def _answer(self, job: Job, outcome: Outcome) -> str | None:
        worker = self._facts.identity
        ticket = None
        error: JobEnd | None = None
        if isinstance(outcome, SequenceOutput):
            ticket = success_ticket(job, worker, outcome)
            error = None if ticket else JobEnd.TOO_LARGE
        else:
            error = outcome
        if error is not None:
            self._release(job)
            ticket = failure_ticket(job, worker, error)
        assert ticket is not None
        await failpoints.hit_async("prefill.before_ticket")
        subject = ticket_subject(job.gateway_id)
        data = await ask(self._bus, subject, ticket.SerializeToString(), job.carrier)
        await failpoints.hit_async("prefill.after_ticket")
        if not _is_taken(data):
            self._release(job)
            self._counters.dropped += 1
        elif error is None:
            self._counters.succeeded += 1
        else:
            self._counters.failed += 1
        return error

    def _release(self, job: Job) -> None:
        """Of an offer that ended already, or was released, the verdict says so: no harm."""
        if job.offer is not None:
            self._exports.release(LeaseKey.of(job.offer))

    def _forget(self, job: Job) -> None:
        self._jobs.pop(job.key, None)
        self._by_seq.pop(job.spec.seq_id, None)
        self._spans.pop(job.spec.seq_id, None)
        self._slots.drop(job.key)
        self._changed()

    # ------------------------------------------------------------ what the engine says

    def _on_events(self, events: Sequence[EngineEvent], record: StepRecord | None) -> None:
        if record is not None:
            self._on_step(record)
        for event in events:
            job = self._by_seq.get(event.seq_id)
            if isinstance(event, SequenceOutput):
                if job is not None and not job.outcome.done():
                    job.end(event)
                elif event.held:
                    # Finished in the very step that came before its abort.
                    seq_id = event.seq_id
                    self._runtime.post(partial(Engine.release_lease, seq_id=seq_id))
            elif isinstance(event, SequenceFailed) and job is not None:
                log.warning("request %s: %s", job.spec.request_id, event.detail)
                job.end(JobEnd(event.reason))
        self._snapshot.refresh()

    def _on_step(self, record: StepRecord) -> None:
        for chunk in record.chunks:
            failpoints.hit("prefill.chunk")
            job = self._by_seq.get(chunk.seq_id)
            if job is not None:
                self._slots.computed(job.key, chunk.start + chunk.num_tokens)
                self._spans[chunk.seq_id].chunk(record, chunk)
        self._slots.step_done(record)

    def _changed(self) -> None:
        self._intake.slot_changed()
        self._registration.changed()


def _parse_accept(data: bytes | None) -> wire.AcceptReply | None:
    try:
        return None if data is None else wire.AcceptReply.FromString(data)
    except DecodeError:
        return None


def _is_taken(data: bytes | None) -> bool:
    try:
        return data is not None and wire.TicketReply.FromString(data).taken
    except DecodeError:
        return False
