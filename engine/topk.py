"""Selection by value from one row of scores, without ever sorting the row."""

import numpy as np
import numpy.typing as npt

from engine.philox import Float32s

Int64s = npt.NDArray[np.int64]

_BLOCK = 32
# What is left of a nucleus search is sorted once it is this small.
_SORT_AT_MOST = 512


def kth_largest(scores: Float32s, k: int) -> float:
    """The k-th largest of ``scores``, 1 <= k <= their number.

    The k-th largest of block maxima bounds it from below (k values are at least that large), so
    that a small k looks at few values twice.
    """
    blocks = len(scores) // _BLOCK
    if k <= blocks // 4:
        # Strided blocks: numpy takes the maximum of long rows fast, of short ones slowly.
        maxima = scores[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(axis=0)
        scores = scores[scores >= np.partition(maxima, blocks - k)[blocks - k]]
    return float(np.partition(scores, len(scores) - k)[len(scores) - k])


def largest(scores: Float32s, k: int) -> Int64s:
    """Ids of the k largest, largest first; of equal ones the lowest id first."""
    k = min(k, len(scores))
    if k == 0:
        return np.empty(0, np.int64)
    ids = np.flatnonzero(scores >= kth_largest(scores, k))
    return ids[np.argsort(-scores[ids], kind="stable")[:k]]


def nucleus(scores: Float32s, mass: float) -> Int64s:
    """Indices of the fewest largest ``scores`` whose weights, exp(score), reach ``mass`` together;
    all where they do not. In no order; of equal scores the first indices are taken.

    Halves the range of scores that the edge can lie in, which leaves few to sort.
    """
    weights = np.exp(scores, dtype=np.float64)
    active = np.arange(len(scores))
    taken: list[Int64s] = []
    missing = mass
    low, high = scores.min(), scores.max()
    while len(active) > _SORT_AT_MOST:
        middle = low + (high - low) / 2
        if not low < middle < high:
            break  # all that is left is equal
        above = scores[active] > middle
        upper = active[above]
        upper_mass = float(weights[upper].sum())
        if upper_mass >= missing:
            active, low = upper, middle
        else:
            taken.append(upper)
            missing -= upper_mass
            active, high = active[~above], middle
    order = active[np.argsort(-scores[active], kind="stable")]
    count = int(np.searchsorted(np.cumsum(weights[order]), missing)) + 1
    return np.concatenate((*taken, order[:count]))
