"""Histograms and the text that Prometheus reads."""

import pytest
from support.scrape import Scrape

from common import histogram
from common.histogram import Histogram
from common.metrics import Exposition


def test_buckets_hold_what_is_at_most_their_bound() -> None:
    """As in Prometheus: ``le`` is an upper bound, included."""
    seen = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 5.0, 7.0):
        seen.observe(value)
    seen.observe(2.0, times=3)
    assert seen.counts == [2, 4, 1, 1]
    assert (seen.count, seen.total) == (8, 21.0)


@pytest.mark.parametrize(
    "bounds",
    [
        histogram.TTFT_S, histogram.TOKEN_S, histogram.LATENCY_S, histogram.TOKENS,
        histogram.ITERATION_TOKENS, histogram.STEP_S, histogram.WAIT_S, histogram.BATCH,
    ],
)  # fmt: skip
def test_bounds_rise(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_the_text() -> None:
    seen = Histogram((0.1, 1.0))
    seen.observe(0.05, times=2)
    seen.observe(3.0)
    out = Exposition("a model", "decode")
    out.gauge("vllm:num_requests_running", "in the batch", 3)
    out.counter("vllm:prompt_tokens", "prompt tokens", 10)
    out.gauges("baton_kv_blocks", "blocks", ("state",), {"free": 1, "cached": 2})
    out.counters("baton_lease_refusals", "", ("operation", "verdict"), {("claim", "expired"): 4})
    out.histogram("vllm:iteration_tokens_total", "tokens a step", seen)
    text = out.text()
    assert 'vllm:prompt_tokens_total{model_name="a model",role="decode"} 10.0' in text
    assert "# TYPE vllm:iteration_tokens_total histogram" in text
    found = Scrape(text)
    assert found("vllm:num_requests_running", model_name="a model", role="decode") == 3
    assert found("baton_kv_blocks", state="cached") == 2
    assert found("baton_lease_refusals_total", operation="claim", verdict="expired") == 4
    buckets = [
        found("vllm:iteration_tokens_total_bucket", le=bound) for bound in ("0.1", "1.0", "+Inf")
    ]
    assert buckets == [2, 2, 3]
    assert found("vllm:iteration_tokens_total_sum") == pytest.approx(3.1)
    assert found("process_cpu_seconds_total") > 0
