"""Measured speeds: of work, not of idle time, and of lately."""

import pytest

from common.types import StepRecord
from worker.rates import PrefillRates, Rate


def step(num_prefill_tokens: int, seconds: float, num_decode_tokens: int = 0) -> StepRecord:
    return StepRecord(1, 5.0, 5.0 + seconds, num_prefill_tokens, num_decode_tokens, 1)


def test_nothing_measured_is_zero() -> None:
    assert Rate().per_s == 0.0
    rates = PrefillRates(64)
    rates.add(step(0, 1.0))
    assert (rates.per_s, rates.full_per_s) == (0.0, 0.0)


def test_samples_weigh_by_their_time_and_old_ones_fade() -> None:
    rate = Rate()
    rate.add(10, 1.0)
    rate.add(90, 4.0)
    assert rate.per_s == pytest.approx(20)
    for _ in range(200):
        rate.add(70, 1.0)
    assert rate.per_s == pytest.approx(70, rel=0.01)


def test_short_steps_tell_nothing_of_full_ones() -> None:
    rates = PrefillRates(64)
    rates.add(step(1, 0.01))
    assert (rates.per_s, rates.full_per_s) == (pytest.approx(100), 0.0)
    rates.add(step(63, 0.03))
    assert rates.full_per_s == pytest.approx(2100)
    assert rates.per_s == pytest.approx(64 / 0.04)


def test_beside_running_streams_only_the_longer_step_counts() -> None:
    rates = PrefillRates(1024)
    for _ in range(100):
        rates.add(step(0, 0.020, 8))
    rates.add(step(60, 0.050, 8))
    assert rates.per_s == pytest.approx(60 / 0.030, rel=0.01)
    rates = PrefillRates(1024)
    rates.add(step(60, 0.050))
    assert rates.per_s == pytest.approx(60 / 0.050)


def test_tokens_that_rode_along_count_a_little_all_the_same() -> None:
    rates = PrefillRates(1024)
    for _ in range(100):
        rates.add(step(0, 0.020, 8))
    rates.add(step(60, 0.019, 8))
    assert rates.per_s == pytest.approx(60 / 0.0019)
