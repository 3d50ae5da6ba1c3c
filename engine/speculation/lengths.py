"""How many drafts each decode of a step gets, so that tokens per second are most.

A draft at place j (1, 2, ...) of a sequence whose drafts are accepted at rate p is emitted with
probability p^j (Leviathan, Kalman, Matias 2023, arXiv 2211.17192, section 3.1). With m drafts in
all, a step of n tokens becomes one of n + m. So::

    tokens per second (m) = (tokens without drafts + the m best p^j) / (time of n + m tokens
                                                                       + time of proposing)

and the best m is taken, 0 among them: with a full batch every token costs, and nothing is drafted.
A choice is kept until another is `HYSTERESIS` better, so that noise does not make it flap.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculation.step_times import StepTimes

HYSTERESIS = 0.03
# What a sequence showed counts less with each further draft.
_DECAY = 0.9
_PRIOR_WEIGHT = 2.0
# No rate is certain: ten drafts are not accepted for ever.
_MAX_RATE = 0.98


class Acceptance:
    """How often a drafted token is accepted whose predecessors were; recent drafts count more."""

    __slots__ = ("_hits", "_prior", "_trials")

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._hits = 0.0
        self._trials = 0.0

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Behind the first draft that was not accepted nothing was tried."""
        self._hits = self._hits * _DECAY + num_accepted
        self._trials = self._trials * _DECAY + num_accepted + (num_accepted < num_drafts)

    @property
    def rate(self) -> float:
        hits = self._hits + self._prior * _PRIOR_WEIGHT
        return min(_MAX_RATE, hits / (self._trials + _PRIOR_WEIGHT))


@dataclass(slots=True)
class Candidate:
    """A decode: its acceptance rate, how many drafts it can have, how many it had last time."""

    rate: float
    reach: int
    before: int = 0


class DraftLengths:
    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._times.observe(num_tokens, seconds)

    def choose(
        self,
        num_tokens: int,
        num_sampled: int,
        candidates: Sequence[Candidate],
        limit: int,
        round_s: float = 0.0,
    ) -> list[int]:
        """Drafts for each candidate, ``limit`` at most in all, in a step of ``num_tokens`` without
        them that samples ``num_sampled``. Proposing takes ``round_s`` for each draft of the longest
        proposal."""
        most = max((candidate.reach for candidate in candidates), default=0)
        num_most = min(max(0, limit), sum(candidate.reach for candidate in candidates))
        seconds = self._times.table(num_tokens, num_tokens + num_most)
        best, chosen = num_sampled / seconds[0], [0] * len(candidates)
        # Proposing costs by the longest proposal: each length of it has a best choice.
        for num_rounds in range(1, most + 1) if round_s else (most,):
            fixed_s = num_rounds * round_s
            gains = _best_gains(candidates, num_rounds, num_most)
            best_num, expected = 0, float(num_sampled)
            for num_drafts, (gain, _) in enumerate(gains, start=1):
                expected += gain
                per_s = expected / (seconds[num_drafts] + fixed_s)
                if per_s > best:
                    best, best_num = per_s, num_drafts
            if best_num:
                chosen = [0] * len(candidates)
                for _, index in gains[:best_num]:
                    chosen[index] += 1
        before = [min(candidate.before, candidate.reach) for candidate in candidates]
        if (num_before := sum(before)) <= num_most:
            kept_s = seconds[num_before] + max(before, default=0) * round_s
            kept = (num_sampled + _expected_gain(candidates, before)) / kept_s
            if best <= kept * (1 + HYSTERESIS):
                return before
        return chosen


def _expected_gain(candidates: Sequence[Candidate], lengths: Sequence[int]) -> float:
    total = 0.0
    for candidate, length in zip(candidates, lengths, strict=True):
        if length:
            rate = candidate.rate
            total += rate * (1 - rate**length) / (1 - rate) if rate < 1 else length
    return total


def _best_gains(
    candidates: Sequence[Candidate], longest: int, limit: int
) -> list[tuple[float, int]]:
    """(expected tokens, candidate) of the drafts that are worth most; of each candidate always
    those before one are among them."""
    gains: list[float] = []
    owners: list[int] = []
    for index, candidate in enumerate(candidates):
        gain = rate = candidate.rate
        for _ in range(min(longest, candidate.reach)):
            gains.append(gain)
            owners.append(index)
            gain *= rate
    best = sorted(range(len(gains)), key=gains.__getitem__, reverse=True)
    return [(gains[place], owners[place]) for place in best[:limit]]
