"""The choice of k: what pays, down to nothing, without flapping."""

import math
import random
from itertools import pairwise

import pytest
from support.engines import GREEDY, Rig, prompt_of, spec_of
from support.proposers import ScriptedProposer, always_wrong, perfect, truth

from common.types import StepRecord
from engine.speculation.lengths import HYSTERESIS, Acceptance, Candidate, DraftLengths
from engine.speculation.statistics import Reason, SpeculationStatistics
from engine.speculation.step_times import NODES, StepTimes

FLAT = {1: 1.0}
# A step of 1 to 16 tokens takes the same time; from there each token costs a sixteenth.
ROOF = {node: max(1.0, node / 16) for node in NODES}


def lengths_of(times: dict[int, float]) -> DraftLengths:
    return DraftLengths(StepTimes(times))


def test_drafts_that_cost_nothing_are_taken_where_they_may_be_accepted() -> None:
    candidates = [Candidate(0.9, 5), Candidate(0.3, 5), Candidate(0.9, 0)]
    assert lengths_of(FLAT).choose(3, 3, candidates, 100) == [5, 5, 0]


def test_a_full_batch_gets_none() -> None:
    lengths = lengths_of(ROOF)
    for num_sequences, expected in ((1, 5), (2, 5), (16, 0), (64, 0)):
        candidates = [Candidate(0.8, 5) for _ in range(num_sequences)]
        chosen = lengths.choose(num_sequences, num_sequences, candidates, 1000)
        assert chosen == [expected] * num_sequences


def test_the_better_guesser_gets_what_is_left_below_the_roof() -> None:
    candidates = [Candidate(0.9, 4), *[Candidate(0.2, 4) for _ in range(11)]]
    assert lengths_of(ROOF).choose(12, 12, candidates, 1000)[0] == 4


def test_the_best_of_all_choices() -> None:
    """Against trying every number of drafts for two sequences."""
    rng = random.Random(1)
    for _ in range(200):
        times = {1: 1.0}
        for before, node in pairwise(NODES):
            times[node] = times[before] + rng.random() * 0.2 * (node - before)
        table = StepTimes(times)
        rates = [rng.random() * 0.95, rng.random() * 0.95]

        def speed(counts: tuple[int, int], rates=rates, table=table) -> float:
            gain = sum(p**j for p, n in zip(rates, counts, strict=True) for j in range(1, n + 1))
            return (2 + gain) / (table.seconds(2 + sum(counts)) + 0.05 * max(counts))

        every = [(a, b) for a in range(5) for b in range(5)]
        candidates = [Candidate(rate, 4) for rate in rates]
        chosen = tuple(DraftLengths(table).choose(2, 2, candidates, 100, round_s=0.05))
        assert speed(chosen) >= max(map(speed, every)) / (1 + HYSTERESIS) - 1e-9


def test_a_limit_is_kept_also_by_a_choice_that_was_better_before() -> None:
    candidates = [Candidate(0.9, 5, before=5), Candidate(0.8, 5, before=5)]
    assert sum(lengths_of(FLAT).choose(2, 2, candidates, 3)) == 3
    assert lengths_of(FLAT).choose(2, 2, candidates, -4) == [0, 0]


def test_a_choice_is_kept_until_another_is_clearly_better() -> None:
    for cost in (1.74, 1.76):  # k = 1 gives 1.75 tokens: about as good as none
        lengths = lengths_of({1: 1.0, 2: cost, 3: 10.0})
        for before in (0, 1):
            assert lengths.choose(1, 1, [Candidate(0.75, 1, before)], 9) == [before]
    clearly = lengths_of({1: 1.0, 2: 1.5, 3: 10.0})
    assert clearly.choose(1, 1, [Candidate(0.75, 1, before=0)], 9) == [1]


def test_acceptance_forgets() -> None:
    acceptance = Acceptance(0.5)
    assert acceptance.rate == 0.5
    for _ in range(30):
        acceptance.add(5, 5)
    assert acceptance.rate > 0.95
    for _ in range(60):
        acceptance.add(5, 0)
    assert acceptance.rate < 0.12


def test_step_times_are_interpolated_and_go_on() -> None:
    times = StepTimes({1: 1.0, 2: 2.0, 4: 3.0, 8: 5.0})
    assert times.seconds(1) == 1.0
    assert times.seconds(2) == 2.0
    assert times.seconds(8) == 5.0
    assert times.seconds(16) == pytest.approx(9.0)
    assert times.seconds(1024) == pytest.approx(513.0)
    for first, last in ((1, 700), (5, 5), (511, 513), (600, 640)):
        expected = [times.seconds(n) for n in range(first, last + 1)]
        assert times.table(first, last) == pytest.approx(expected)


def test_step_times_follow_what_is_seen_and_forgive() -> None:
    times = StepTimes(ROOF)
    for _ in range(100):
        times.observe(4, 3.0)
    assert times.seconds(4) == pytest.approx(3.0, rel=0.02)
    assert times.seconds(64) > 5
    times = StepTimes(ROOF)
    times.observe(6, 1000.0)
    spoiled = times.seconds(6)
    assert spoiled < 1.2
    for _ in range(1500):
        times.observe(1, 1.0)
    assert times.seconds(6) - 1 < (spoiled - 1) / 4


def test_without_measurement_the_first_step_sets_the_scale() -> None:
    times = StepTimes()
    times.observe(3, 0.02)
    assert times.seconds(1) == times.seconds(100) == pytest.approx(0.02)


# ---------------------------------------------------------------- in an engine


def speculation_of(rig: Rig) -> SpeculationStatistics:
    speculation = rig.engine.statistics().speculation
    assert speculation is not None
    return speculation


def test_a_useless_proposer_falls_silent_and_is_tried_again_now_and_then() -> None:
    rig = Rig(200, proposer=always_wrong(), lengths=lengths_of({1: 1.0, 2: 1.2, 3: 1.4}))
    keep_times(rig)
    spec = spec_of(prompt_of(1, 8), GREEDY.__class__(max_tokens=600, seed=0, temperature=0.0))
    rig.run(spec)
    rig.assert_right([spec])
    speculation = speculation_of(rig)
    assert 3 <= speculation.num_draft_tokens <= 30
    assert speculation.reasons[Reason.PROBE] >= 2


def test_a_proposer_that_is_free_is_watched_while_silent() -> None:
    """Wrong for long, then right: it comes back without a probe."""
    calls = 0

    def guess(sequence, num_drafts):
        nonlocal calls
        calls += 1
        right = truth(sequence, num_drafts)
        return right if calls > 60 else [(token_id + 1) % 512 for token_id in right]

    proposer = ScriptedProposer(guess, is_free=True)
    rig = Rig(200, proposer=proposer, lengths=lengths_of({1: 1.0, 2: 1.3, 3: 1.6}))
    keep_times(rig)
    spec = spec_of(prompt_of(1, 8), GREEDY.__class__(max_tokens=300, seed=0, temperature=0.0))
    rig.run(spec)
    rig.assert_right([spec])
    speculation = speculation_of(rig)
    assert speculation.reasons.get(Reason.PROBE, 0) == 0
    assert speculation.reasons[Reason.NO_GAIN] > 40
    assert speculation.num_accepted_tokens > 150


def test_changes_of_k_in_mid_sequence_change_nothing() -> None:
    """Step times that jump about make k go up and down all the time."""
    rng = random.Random(4)

    class Restless(DraftLengths):
        def observe(self, num_tokens: int, seconds: float) -> None:
            table = {node: 1.0 + rng.random() * node for node in NODES}
            self._times = StepTimes(table)

    rig = Rig(64, proposer=perfect(), lengths=Restless(StepTimes(FLAT)))
    specs = [spec_of(prompt_of(n, 6 + n), GREEDY) for n in range(5)]
    rig.run(*specs)
    rig.assert_right(specs)
    assert sum(count > 0 for count in speculation_of(rig).lengths) >= 3
    rig.assert_idle()


def keep_times(rig: Rig) -> None:
    """The rig's clock makes all steps take the same: leave the table as the test gave it."""
    assert rig.speculator is not None

    def ignore(record: StepRecord) -> None:
        assert not math.isnan(record.end_s)

    rig.speculator.step_took = ignore  # type: ignore[method-assign]
