"""A goodness-of-fit test without scipy."""

import math
from collections.abc import Sequence

_Z_0001 = 3.0902  # upper 0.001 quantile of the normal distribution


def assert_fits(counts: Sequence[int], probabilities: Sequence[float]) -> None:
    """Fails where the counts would come from the probabilities with a chance under 0.001."""
    total = sum(counts)
    pairs = [(n, p * total) for n, p in zip(counts, probabilities, strict=True)]
    if any(n > 0 for n, expected in pairs if expected == 0):
        raise AssertionError("an impossible id was drawn")
    possible = [(n, expected) for n, expected in pairs if expected > 0]
    if min(expected for _, expected in possible) < 5:
        raise ValueError("too few draws for this test")
    statistic = sum((n - expected) ** 2 / expected for n, expected in possible)
    freedom = len(possible) - 1
    if freedom == 0:
        return
    # Wilson and Hilferty 1931: the cube root of chi-square is nearly normal.
    spread = 2 / (9 * freedom)
    limit = freedom * (1 - spread + _Z_0001 * math.sqrt(spread)) ** 3
    if statistic >= limit:
        raise AssertionError(f"chi-square {statistic:.1f} over {limit:.1f}: {list(counts)}")
