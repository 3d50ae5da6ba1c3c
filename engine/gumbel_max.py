"""The arg max of score + Gumbel noise, which is a sample of softmax(score), with little noise made.

A Philox counter costs some 50 ns, a vocabulary has 12,000 of them or more, and most ids cannot win:

1. The best 64 candidates of every row get their noise, all rows at once. ``best`` is the greatest
   sum of a row.
2. Another id wins only if its noise closes the gap to ``best``, and noise is below MAX_GUMBEL: ids
   further down than that get none.
3. Scores are at most 0, so the winner's noise is at least ``best``: logarithms are taken only of
   words that large.

Nothing is approximated: the result is that of making all the noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.philox import IDS_PER_COUNTER, MAX_GUMBEL, Float32s, UInt64s, gumbel, words
from engine.topk import Int64s, kth_largest

_NUM_FIRST = 64
# fp32 sums are rounded: bounds are taken a little wide.
_MARGIN = 0.05


@dataclass(frozen=True, slots=True)
class Draw:
    """One row: the ids that may be chosen, ascending, with their scores, the greatest 0."""

    ids: Int64s
    scores: Float32s
    seed: int
    position: int


def gumbel_max(draws: Sequence[Draw]) -> list[int]:
    """The chosen id of each row; of equal sums the lowest id."""
    if not draws:
        return []
    firsts = [_best_candidates(draw.scores) for draw in draws]
    lengths = [len(first) for first in firsts]
    seeds = np.repeat(np.array([draw.seed for draw in draws], np.uint64), lengths)
    positions = np.repeat(np.array([draw.position for draw in draws], np.uint64), lengths)
    ids = np.concatenate([draw.ids[first] for draw, first in zip(draws, firsts, strict=True)])
    noise = gumbel(_words_of_ids(seeds, positions, ids))
    ends = np.cumsum(lengths)[:-1]
    chosen = []
    for draw, first, row_noise in zip(draws, firsts, np.split(noise, ends), strict=True):
        sums = draw.scores[first] + row_noise
        winner = int(sums.argmax())
        if len(first) < len(draw.ids):
            chosen.append(_among_all(draw, float(sums[winner])))
        else:
            chosen.append(int(draw.ids[first[winner]]))
    return chosen


def _best_candidates(scores: Float32s) -> Int64s:
    """Indices, ascending, of the candidates that get their noise first."""
    if len(scores) <= _NUM_FIRST:
        return np.arange(len(scores))
    return np.flatnonzero(scores >= kth_largest(scores, _NUM_FIRST))


def _among_all(draw: Draw, best: float) -> int:
    """The winner of a row, given the sum of one of its ids."""
    within = np.flatnonzero(draw.scores > best - MAX_GUMBEL - _MARGIN)
    ids = draw.ids[within]
    seed, position = np.array([draw.seed], np.uint64), np.array([draw.position], np.uint64)
    random = _words_of_ids(seed, position, ids)
    # u is at least (word - 2**9) / 2**32; the noise of u is at least that of the least that wins.
    least = math.exp(-math.exp(_MARGIN - best)) * 2**32 - 2**9
    lucky = np.flatnonzero(random >= np.uint64(max(least, 0)))
    sums = draw.scores[within[lucky]] + gumbel(random[lucky])
    return int(ids[lucky[sums.argmax()]])


def _words_of_ids(seeds: UInt64s, positions: UInt64s, ids: Int64s) -> UInt64s:
    """The word of each of ``ids``. ``seeds`` and ``positions`` are one an id, or ``[1]`` for one
    sequence; its neighbouring ids, ascending, then share their counters."""
    groups = ids // IDS_PER_COUNTER
    column = np.arange(len(ids))
    if len(seeds) == 1:
        starts = np.concatenate(([True], groups[1:] != groups[:-1]))
        groups = groups[starts]
        column = np.cumsum(starts) - 1
    return words(seeds, positions, groups.astype(np.uint64))[ids % IDS_PER_COUNTER, column]
