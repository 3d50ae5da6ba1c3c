"""Measured speeds: of work, not of idle time, and of lately."""

import pytest

from common.types import StepRecord
from worker.rates import PrefillRates, Rate


def step(num_prefill_tokens: int, seconds: float) -> StepRecord:
    return StepRecord(1, 5.0, 5.0 + seconds, num_prefill_tokens, 0, 1)


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
