"""The spans of one sequence on a decode worker.

``decode`` from Start to the end; within that time ``decode.queue`` until the engine made room,
``kv.fetch`` (claim, copy, settle), or one ``prefill.chunk`` a step where this worker computes the
prompt, and ``decode.run`` over all steps that gave tokens, linked to the first and the last.
``decode`` and ``decode.run`` carry the FLOPs and bytes of the sequence's decodes (engine/flops.py).

All are children of the attempt's span, which the gateway ends: a worker that dies takes its open
spans with it, and none of those that it has sent is left without a parent.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from common.telemetry import Carrier, Telemetry
from common.types import ChunkRecord, SequenceOutput, SequenceSpec, StepRecord
from engine.flops import Cost
from kv_transfer.base import FetchResult
from worker.spans import StepSpans, cost_attributes


class FetchSpan:
    """What the copy says of itself once it has returned."""

    def __init__(self) -> None:
        self.result: FetchResult | None = None
        self.reason = ""


class SequenceSpans:
    def __init__(
        self,
        telemetry: Telemetry,
        steps: StepSpans,
        spec: SequenceSpec,
        carrier: Carrier,
        is_handed_off: bool,
    ) -> None:
        self._telemetry = telemetry
        self._steps = steps
        self._carrier = carrier
        self._queued_s: float | None = spec.arrival_s
        self._first: StepRecord | None = None
        self._last: StepRecord | None = None
        self._num_tokens = 0
        self._num_prompt = len(spec.prompt_ids)
        # What its decodes cost: a row of a step each, which attends to all tokens before it.
        self._num_decodes = 0
        self._num_context = 0
        self._num_drafted = 0
        self._num_accepted = 0
        self._num_draft_context = 0
        self._weight_bytes = 0.0
        self._chunk_step_id = 0
        self._span = telemetry.start_span(
            "decode",
            parent=carrier,
            start_s=spec.arrival_s,
            attributes={
                "baton.request_id": spec.request_id,
                "baton.attempt": spec.attempt,
                "baton.num_tokens": spec.num_tokens,
                "baton.local_prefill": not is_handed_off,
            },
        )

    def admitted(self, now_s: float) -> None:
        """The engine has blocks for it."""
        if self._queued_s is not None:
            self._telemetry.record_span("decode.queue", self._queued_s, now_s, parent=self._carrier)
            self._queued_s = None

    @contextmanager
    def fetch(self) -> Iterator[FetchSpan]:
        fetched = FetchSpan()
        with self._telemetry.span("kv.fetch", parent=self._carrier) as span:
            yield fetched
            if (result := fetched.result) is not None:
                span.set("baton.transport", result.transport)
                span.set("baton.transport_reason", fetched.reason)
                span.set("baton.num_blocks", result.num_blocks)
                span.set("baton.num_bytes", result.num_bytes)
                if result.duration_s > 0:
                    span.set("baton.gb_per_s", result.num_bytes / result.duration_s / 1e9)

    def chunk(self, record: StepRecord, chunk: ChunkRecord) -> None:
        if not self._telemetry.enabled:
            return
        self.admitted(record.start_s)
        self._steps.record_chunk(record, chunk, self._carrier)
        self._chunk_step_id = record.step_id

    def tokens(self, record: StepRecord, output: SequenceOutput) -> None:
        if not self._telemetry.enabled:
            return
        self._first = self._first or record
        self._last = record
        self._num_tokens += len(output.token_ids)
        if record.step_id != self._chunk_step_id:  # else the chunk's span has it
            self._num_decodes += 1
            num_context = self._num_prompt + output.index
            self._num_context += num_context
            if output.num_drafts:
                self._num_drafted += output.num_drafts
                self._num_accepted += len(output.token_ids) - 1
                first = num_context + 1
                self._num_draft_context += sum(range(first, first + output.num_drafts))
            self._weight_bytes += self._steps.weight_share(record)

    def end(self, error: str | None) -> None:
        if not self._telemetry.enabled:
            return
        costs = self._steps.costs
        decodes = costs.decodes(self._num_decodes, self._num_context)
        decodes += costs.drafts(self._num_drafted, self._num_draft_context)
        cost = {**cost_attributes(decodes + Cost(0.0, self._weight_bytes))}
        if self._num_drafted:
            cost["baton.drafted"] = self._num_drafted
            cost["baton.accepted"] = self._num_accepted
            cost["baton.tokens_per_step"] = self._num_tokens / max(1, self._num_decodes)
        for name, value in cost.items():
            self._span.set(name, value)
        if self._first is not None and self._last is not None:
            self._telemetry.record_span(
                "decode.run",
                self._first.start_s,
                self._last.end_s,
                parent=self._carrier,
                attributes={"baton.num_tokens": self._num_tokens, **cost},
                links=(self._steps.link(self._first), self._steps.link(self._last)),
                error=error,
            )
        self._span.end(error)
