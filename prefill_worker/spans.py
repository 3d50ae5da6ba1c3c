"""The spans of one job.

``prefill`` from arrival to the ticket's answer; within that time ``prefill.queue`` until the first
chunk began, one ``prefill.chunk`` a step (linked to that step), ``kv.offer`` and
``prefill.ticket``. A chunk carries what its share of the step cost, ``prefill`` the sum of its
chunks (engine/flops.py). All are children of the attempt's span, which came with the job; see
decode_worker/spans.py for why.
"""

from contextlib import AbstractContextManager

from common.telemetry import Span, Telemetry
from common.types import ChunkRecord, StepRecord
from engine.flops import Cost
from prefill_worker.job import Job
from worker.spans import StepSpans, cost_attributes


class JobSpans:
    def __init__(self, telemetry: Telemetry, steps: StepSpans, job: Job) -> None:
        self._telemetry = telemetry
        self._steps = steps
        self._job = job
        self._queued = True
        self._cost = Cost()
        self._span = telemetry.start_span(
            "prefill",
            parent=job.carrier,
            start_s=job.arrived_s,
            attributes={
                "baton.request_id": job.spec.request_id,
                "baton.attempt": job.spec.attempt,
                "baton.num_tokens": job.spec.num_tokens,
            },
        )

    def chunk(self, record: StepRecord, chunk: ChunkRecord) -> None:
        if not self._telemetry.enabled:
            return
        if self._queued:
            self._queued = False
            self._telemetry.record_span(
                "prefill.queue", self._job.arrived_s, record.start_s, parent=self._job.carrier
            )
        self._cost += self._steps.record_chunk(record, chunk, self._job.carrier)

    def sampled(self, num_cached_tokens: int) -> None:
        self._span.event("sample")
        self._span.set("baton.num_cached_tokens", num_cached_tokens)

    def offer(self, num_blocks: int, num_bytes: int) -> AbstractContextManager[Span]:
        return self._telemetry.span(
            "kv.offer",
            parent=self._job.carrier,
            attributes={"baton.num_blocks": num_blocks, "baton.num_bytes": num_bytes},
        )

    def ticket(self) -> AbstractContextManager[Span]:
        return self._telemetry.span("prefill.ticket", parent=self._job.carrier)

    def end(self, error: str | None) -> None:
        for name, value in cost_attributes(self._cost).items():
            self._span.set(name, value)
        self._span.end(error)
