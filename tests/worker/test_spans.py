"""The two compute phases say in their spans what they cost."""

from collections.abc import Iterator

import pytest
from support.collector import Collector, collecting
from support.engines import spec_of

from cli.otlp import TraceSpan
from common.telemetry import Telemetry
from common.types import ChunkRecord, SequenceCounts, SequenceOutput, StepRecord
from decode_worker.spans import SequenceSpans
from engine.flops import Cost, ModelCosts, decode_cost, prefill_cost
from worker.spans import StepSpans

COSTS = ModelCosts(
    token_flops=1000, pair_flops=8, logits_flops=100, layer_bytes=4000, head_bytes=400, kv_bytes=16
)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


async def test_a_local_prefill_and_its_decodes(collector: Collector) -> None:
    """A prompt of 10 in two chunks, and 3 decodes, alone in their steps: the spans carry all that
    the steps cost, each step once."""
    telemetry = Telemetry("baton-decode", "d", collector.endpoint, clock=lambda: 1.0)
    spec = spec_of(range(10))
    with telemetry.span("attempt") as attempt:
        steps = StepSpans(telemetry, COSTS)
        spans = SequenceSpans(telemetry, steps, spec, attempt.carrier, is_handed_off=False)
        chunks = [ChunkRecord(spec.seq_id, 0, 6), ChunkRecord(spec.seq_id, 6, 4, num_logits=1)]
        records = [
            StepRecord(1, 1.0, 1.1, 6, 0, 1, chunks=(chunks[0],)),
            StepRecord(2, 1.1, 1.2, 4, 0, 1, chunks=(chunks[1],)),
            *(StepRecord(3 + i, 1.2, 1.3, 0, 1, 1, (), 11 + i) for i in range(3)),
        ]
        for record in records:
            for chunk in record.chunks:
                spans.chunk(record, chunk)
            if record.step_id > 1:
                output = SequenceOutput(spec.seq_id, record.step_id - 2, (7,), SequenceCounts())
                spans.tokens(record, output)
        spans.end(None)
    await telemetry.shutdown()
    found = collector.trace(attempt.trace_id)
    by_name = {name: [s for s in found if s.name == name] for name in {s.name for s in found}}
    _assert_costs(
        [prefill_cost(COSTS, record) for record in records[:2]],
        sorted(by_name["prefill.chunk"], key=lambda span: span.attributes["baton.start"]),
    )
    whole = sum((decode_cost(COSTS, record) for record in records), Cost())
    _assert_costs([whole, whole], by_name["decode"] + by_name["decode.run"])
    assert by_name["decode.run"][0].attributes["baton.num_tokens"] == 4


def _assert_costs(costs: list[Cost], spans: list[TraceSpan]) -> None:
    assert len(spans) == len(costs)
    for cost, span in zip(costs, spans, strict=True):
        attributes = span.attributes
        assert attributes["baton.flops"] == cost.flops
        assert attributes["baton.bytes"] == pytest.approx(cost.num_bytes)
        assert attributes["baton.arithmetic_intensity"] == pytest.approx(cost.intensity)
