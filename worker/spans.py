"""Engine steps in the traces of the requests that they served.

A step serves many requests, so it is no child of one: it is a trace of its own, which the spans of
the requests link to. It is made only when something links to it.
"""

from common.telemetry import Carrier, Telemetry
from common.types import StepRecord


class StepSpans:
    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._last: tuple[int, Carrier] | None = None

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
                    "baton.num_sequences": record.num_sequences,
                },
            )
            self._last = (record.step_id, carrier)
        return self._last[1]
