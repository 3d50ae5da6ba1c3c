"""The jobs of a prefill worker from the accept to the ticket's answer; see prefill_worker/worker.py
for the life of one. Runs on the event loop; what it tells the engine is posted, in order.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from google.protobuf.message import DecodeError

from common import failpoints
from common.bus import Bus, BusError, accept_subject, ticket_subject
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
from engine.loop import EngineRuntime
from kv_transfer.exports import Exports
from kv_transfer.lease import LeaseEnd, LeaseKey
from prefill_worker.intake import Ack
from prefill_worker.job import Job, JobEnd, Outcome
from prefill_worker.protocol import ask
from prefill_worker.slots import Slots
from prefill_worker.spans import JobSpans
from prefill_worker.statistics import Counters
from prefill_worker.ticket import failure_ticket, success_ticket
from worker.report import WorkerFacts
from worker.snapshot import EngineSnapshot
from worker.spans import StepSpans
from worker.tasks import Tasks

log = logging.getLogger(__name__)


class Jobs:
    """``changed`` is called when a job has come, gone or begun. Takes jobs while ``accepting``."""

    def __init__(
        self,
        facts: WorkerFacts,
        slots: Slots,
        bus: Bus,
        exports: Exports,
        runtime: EngineRuntime,
        snapshot: EngineSnapshot,
        telemetry: Telemetry,
        changed: Callable[[], None],
    ) -> None:
        self.counters = Counters()
        self.accepting = False
        self._facts = facts
        self._slots = slots
        self._bus = bus
        self._exports = exports
        self._runtime = runtime
        self._snapshot = snapshot
        self._telemetry = telemetry
        self._changed = changed
        self._steps = StepSpans(telemetry, facts.costs)
        self._tasks = Tasks()
        self._jobs: dict[tuple[RequestId, int], Job] = {}
        self._by_seq: dict[SequenceId, Job] = {}
        self._spans: dict[SequenceId, JobSpans] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    async def wait_idle(self) -> None:
        await self._tasks.wait_idle()

    def end_all(self, reason: JobEnd) -> None:
        for job in self:
            job.end(reason)

    async def stop(self) -> None:
        await self._tasks.cancel()

    # ------------------------------------------------------------ for the intake

    @property
    def has_free_slot(self) -> bool:
        blocks = self._snapshot.current.blocks
        return self.accepting and self._slots.is_free(blocks.free + blocks.cached)

    @property
    def num_queued_tokens(self) -> int:
        return self._slots.num_queued_tokens

    def knows(self, key: tuple[RequestId, int]) -> bool:
        return key in self._jobs

    def take(self, job: Job, ack: Ack) -> None:
        num_blocks = job.spec.num_tokens // self._facts.layout.block_size + 2
        self._slots.take(job.key, job.spec.num_tokens, num_blocks)
        self._jobs[job.key] = job
        # Before anyone is told: a job that is held is also served, whatever fails after this.
        self._tasks.spawn(self._serve(job, ack), f"job {job.spec.request_id}")
        self._changed()

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
            if await failpoints.hit_async("prefill.before_ack") != failpoints.DROP:
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
        fault = await failpoints.hit_async("prefill.before_accept")
        request = wire.AcceptRequest(
            request_id=job.spec.request_id,
            attempt=job.spec.attempt,
            worker_id=self._facts.identity.worker_id,
            epoch=self._facts.identity.epoch,
        )
        subject = accept_subject(job.gateway_id)
        in_vain = partial(self._asked_in_vain, job)
        data = await ask(self._bus, subject, request.SerializeToString(), job.carrier, in_vain)
        if fault == failpoints.DUP:
            data = await ask(self._bus, subject, request.SerializeToString(), job.carrier, in_vain)
        reply = _parse_accept(data)
        if reply is None or not reply.granted:
            self.counters.refused += 1
            return None
        self.counters.granted += 1
        await failpoints.hit_async("prefill.after_accept")
        return reply.remaining_ms / 1000

    def _asked_in_vain(self, job: Job) -> None:
        self._slots.asked_in_vain(job.key)
        self._changed()

    async def _work(self, job: Job, spans: JobSpans, deadline_s: float) -> str | None:
        """Computes, offers, answers. Returns the error that ends the span, None for none."""
        outcome = await self._compute(job, deadline_s)
        if isinstance(outcome, SequenceOutput):
            await self._offer(job, outcome, spans)
        if job.cancelled:
            self._release(job)
            self.counters.cancelled += 1
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
            self._tell(lambda engine: engine.add(spec))
            self._slots.added(job.key, loop.time())
            self._changed()
            async with asyncio.timeout_at(deadline_s):
                await asyncio.wait((job.outcome,))
        except TimeoutError:
            job.end(JobEnd.DEADLINE)
        finally:
            outcome = job.outcome.result() if job.outcome.done() else JobEnd.CANCELLED
            if not isinstance(outcome, SequenceOutput):
                self._tell(lambda engine: engine.abort(spec.seq_id))
        return outcome

    async def _offer(self, job: Job, output: SequenceOutput, spans: JobSpans) -> None:
        """Puts the prompt's blocks, if they are held, under a lease, whose end gives them back to
        the engine."""
        spec = job.spec
        num_bytes = len(output.held) * self._facts.layout.block_bytes

        def give_back(_: LeaseEnd | None) -> None:
            self._tell(lambda engine: engine.release_lease(spec.seq_id))

        try:
            spans.sampled(output.counts.cached)
            await failpoints.hit_async("prefill.after_compute")
            if output.held:
                with spans.offer(len(output.held), num_bytes):
                    job.offer = await self._exports.offer(
                        output.held, spec.num_tokens, spec.attempt, give_back
                    )
        finally:
            if output.held and job.offer is None:
                give_back(None)

    async def _answer(self, job: Job, outcome: Outcome) -> str | None:
        worker = self._facts.identity
        ticket = None
        error: JobEnd | None = None
        if isinstance(outcome, SequenceOutput):
            ticket = success_ticket(job, worker, outcome)
            error = None if ticket else JobEnd.MESSAGE_TOO_LARGE
        else:
            error = outcome
        if error is not None:
            self._release(job)
            ticket = failure_ticket(job, worker, error)
        assert ticket is not None
        fault = await failpoints.hit_async("prefill.before_ticket")
        subject = ticket_subject(job.gateway_id)
        data = await ask(self._bus, subject, ticket.SerializeToString(), job.carrier)
        if fault == failpoints.DUP:
            data = await ask(self._bus, subject, ticket.SerializeToString(), job.carrier)
        await failpoints.hit_async("prefill.after_ticket")
        if not _is_taken(data):
            self._release(job)
            self.counters.dropped += 1
        elif error is None:
            self.counters.succeeded += 1
        else:
            self.counters.failed += 1
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

    def _tell(self, command: Callable[[Engine], object]) -> None:
        """Whatever the engine is told may make room, which only a new snapshot shows."""
        self._runtime.post(command)
        self._snapshot.refresh()

    # ------------------------------------------------------------ what the engine says

    def on_events(self, events: Sequence[EngineEvent], record: StepRecord | None) -> None:
        if record is not None:
            try:
                self._on_step(record)
            except Exception:
                # Those of its prompts that ended are told below: their blocks wait for it.
                log.exception("a bug in the records of a step")
        for event in events:
            self._on_event(event)
        self._snapshot.step_done(record)

    def _on_event(self, event: EngineEvent) -> None:
        job = self._by_seq.get(event.seq_id)
        if isinstance(event, SequenceOutput):
            if job is not None and not job.outcome.done():
                job.end(event)
            elif event.held:
                # Finished in the very step that came before its abort.
                self._tell(partial(Engine.release_lease, seq_id=event.seq_id))
        elif isinstance(event, SequenceFailed) and job is not None:
            log.warning("request %s: %s", job.spec.request_id, event.detail)
            job.end(JobEnd(event.reason))

    def _on_step(self, record: StepRecord) -> None:
        for chunk in record.chunks:
            failpoints.hit("prefill.chunk")
            job = self._by_seq.get(chunk.seq_id)
            if job is not None:
                self._slots.computed(job.key, chunk.start + chunk.num_tokens)
                self._spans[chunk.seq_id].chunk(record, chunk)
        self._slots.step_done(record)


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
