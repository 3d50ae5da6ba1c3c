"""Stops and the counting of what was computed, cached or computed again."""

from dataclasses import replace

import pytest
from support.engines import GREEDY, spec_of

from common.types import FinishReason, SequenceSpec
from engine.sequence import Sequence


def sequence_of(spec: SequenceSpec, max_model_len: int = 100) -> Sequence:
    return Sequence(spec, None, 1, max_model_len, 0.0, is_import=False)


def test_a_stop_token_counts_from_min_tokens_on() -> None:
    params = replace(GREEDY, max_tokens=9, min_tokens=3, stop_token_ids=(7,))
    sequence = sequence_of(spec_of((1, 2), params))
    assert [sequence.accept(i) for i in (7, 7, 7)] == [None, None, FinishReason.STOP]


def test_a_stop_at_the_limit_is_a_stop() -> None:
    params = replace(GREEDY, max_tokens=2, stop_token_ids=(7,))
    assert sequence_of(spec_of((1,), params, (5,))).accept(7) is FinishReason.STOP
    assert sequence_of(spec_of((1,), params, (5,))).accept(8) is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("max_tokens", "prefill_only", "limit"),
    [(0, False, 5), (1, False, 5), (4, False, 8), (4, True, 5)],
)
def test_what_will_ever_be_computed(max_tokens: int, prefill_only: bool, limit: int) -> None:
    spec = spec_of(range(5), replace(GREEDY, max_tokens=max_tokens), prefill_only=prefill_only)
    assert sequence_of(spec).compute_limit == limit
    assert sequence_of(spec, max_model_len=7).compute_limit == min(limit, 6)


def test_tokens_are_counted_by_where_their_kv_came_from() -> None:
    # Prompt 0..9, resumed output 10..12, of which 12 was sampled last and never computed.
    sequence = sequence_of(spec_of(range(10), replace(GREEDY, max_tokens=50), (1, 2, 3)))
    for end in (6, 11, 13, 14):
        sequence.settle(end)
    counts = sequence.update_counts(0.0)
    assert (counts.computed, counts.recomputed) == (10, 2)
    sequence.forget_kv()
    sequence.start_from(8)
    for end in (14, 15):
        sequence.settle(end)
    counts = sequence.update_counts(0.0)
    assert (counts.computed, counts.recomputed) == (10, 2 + 6)
