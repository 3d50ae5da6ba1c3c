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

from engine.philox import IDS_PER_COUNTER, MAX_GUMBEL, Float32s, gumbel, words
from engine.topk import Int64s, kth_largest

_NUM_FIRST = 64
_GROUP_BITS = IDS_PER_COUNTER.bit_length() - 1
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
    # One counter an id: few of these ids are neighbours.
    random = words(seeds, positions, (ids >> _GROUP_BITS).astype(np.uint64))
    noise = gumbel(random[ids & (IDS_PER_COUNTER - 1), np.arange(len(ids))])
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
    groups = ids >> _GROUP_BITS
    is_first = np.concatenate(([True], groups[1:] != groups[:-1]))  # ids ascend, and so do groups
    counters = groups[is_first].astype(np.uint64)
    seed, position = np.array([draw.seed], np.uint64), np.array([draw.position], np.uint64)
    column = np.cumsum(is_first) - 1
    word = (ids & (IDS_PER_COUNTER - 1)) * len(counters) + column
    random = words(seed, position, counters).reshape(-1).take(word)
    # u is at least (word - 2**9) / 2**32; the noise of u is at least that of the least that wins.
    least = math.exp(-math.exp(_MARGIN - best)) * 2**32 - 2**9
    lucky = np.flatnonzero(random >= np.uint64(max(least, 0)))
    sums = draw.scores[within[lucky]] + gumbel(random[lucky])
    return int(ids[lucky[sums.argmax()]])
