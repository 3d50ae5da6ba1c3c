"""Engine steps in the traces of the requests that they served.

A step serves many requests, so it is no child of one: it is a trace of its own, which the spans of
the requests link to. It is made only when something links to it.
"""

from common.telemetry import Attributes, Carrier, Telemetry
from common.types import ChunkRecord, StepRecord
from engine.flops import Cost, ModelCosts, chunk_cost


class StepSpans:
    """``costs``: what the model's steps cost, for the spans of the two compute phases."""

    def __init__(self, telemetry: Telemetry, costs: ModelCosts) -> None:
        self.costs = costs
        self._telemetry = telemetry
        self._last: tuple[int, Carrier] | None = None
        self._share: tuple[int, float] = (0, 0.0)

    def link(self, record: StepRecord) -> Carrier:
        """The carrier of the step's span; steps are asked for in order."""
        if self._last is None or self._last[0] != record.step_id:
            carrier = self._telemetry.record_span(
                "engine.step",
                record.start_s,
                record.end_s,
                attributes={
                    "baton.step_id": record.step_id,
                    "baton.num_prefill_tokens": record.num_prefill_tokens,
                    "baton.num_decode_tokens": record.num_decode_tokens,
                    "baton.num_draft_tokens": record.num_draft_tokens,
                    "baton.num_accepted_tokens": record.num_accepted_tokens,
                    "baton.num_sequences": record.num_sequences,
                },
            )
            self._last = (record.step_id, carrier)
        return self._last[1]

    def weight_share(self, record: StepRecord) -> float:
        """Bytes of weights that fall to one decode of the step; asked for once a token."""
        step_id, share = self._share
        if step_id != record.step_id:
            share = self.costs.weight_share(record, has_logits=True)
            self._share = (record.step_id, share)
        return share

    def record_chunk(self, record: StepRecord, chunk: ChunkRecord, parent: Carrier) -> Cost:
        """The span of a part of a prompt that one step computed."""
        cost = chunk_cost(self.costs, record, chunk)
        self._telemetry.record_span(
            "prefill.chunk",
            record.start_s,
            record.end_s,
            parent=parent,
            attributes={
                "baton.start": chunk.start,
                "baton.num_tokens": chunk.num_tokens,
                **cost_attributes(cost),
            },
            links=(self.link(record),),
        )
        return cost


def cost_attributes(cost: Cost) -> Attributes:
    """FLOPs, bytes moved and FLOPs a byte: under which of the machine's two roofs the work is."""
    return {
        "baton.flops": cost.flops,
        "baton.bytes": cost.num_bytes,
        "baton.arithmetic_intensity": cost.intensity,
    }
