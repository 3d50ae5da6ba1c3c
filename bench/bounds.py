"""Figures beside the bounds that they are held against, and intervals of paired measurements."""

import math
import statistics
from collections.abc import Sequence
from typing import Any


def at_most(value: float, bound: float, unit: str) -> dict[str, Any]:
    return {"value": value, "unit": unit, "at_most": bound, "ok": value <= bound}


def at_least(value: float, bound: float, unit: str) -> dict[str, Any]:
    return {"value": value, "unit": unit, "at_least": bound, "ok": value >= bound}


def pair_interval(differences: Sequence[float]) -> dict[str, Any]:
    """The median of paired differences and its 95 % interval, by the sign test: between order
    statistics that the binomial distribution makes wide enough, whatever the differences' own is
    (with fewer than 6 pairs nothing is, and it is their whole range)."""
    ascending = sorted(differences)
    num = len(ascending)
    rank, tail = 0, 1.0
    while tail <= 0.025 * 2**num:
        rank += 1
        tail += math.comb(num, rank)
    low = max(0, rank - 1)
    return {
        "median": statistics.median(ascending),
        "interval_95": [ascending[low], ascending[num - 1 - low]],
    }
