"""From outcomes to figures: percentiles, throughput, goodput."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cli.bench.load import Ending, Outcome


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request must keep to be good (DistServe, section 2): both, at once."""

    ttft_s: float
    tpot_s: float

    def met(self, outcome: Outcome) -> bool:
        if outcome.ending is not Ending.OK:
            return False
        tpot_s = outcome.tpot_s
        return outcome.ttft_s <= self.ttft_s and (tpot_s is None or tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds, by nearest rank."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one load. Rates are over ``duration_s``, first start to last end. ``reasons`` counts the
    refusals and failures by their text. A spread is None where nothing was measured."""

    num_requests: int
    num_ok: int
    num_refused: int
    num_failed: int
    reasons: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    num_good: int
    goodput: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None


def summarise(outcomes: Sequence[Outcome], targets: Targets) -> Summary:
    """``goodput`` is requests a second inside both targets."""
    ok = [outcome for outcome in outcomes if outcome.ending is Ending.OK]
    endings = Counter(outcome.ending for outcome in outcomes)
    begin_s = min((outcome.start_s for outcome in outcomes), default=0.0)
    duration_s = max((outcome.end_s for outcome in outcomes), default=0.0) - begin_s
    output_tokens = sum(outcome.num_output for outcome in ok)
    num_good = sum(map(targets.met, outcomes))
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Summary(
        num_requests=len(outcomes),
        num_ok=len(ok),
        num_refused=endings[Ending.REFUSED],
        num_failed=endings[Ending.FAILED],
        reasons=dict(Counter(outcome.reason for outcome in outcomes if outcome.reason)),
        duration_s=duration_s,
        prompt_tokens=sum(outcome.num_prompt for outcome in ok),
        output_tokens=output_tokens,
        requests_per_s=len(ok) * per_s,
        output_tokens_per_s=output_tokens * per_s,
        num_good=num_good,
        goodput=num_good * per_s,
        ttft_ms=spread(outcome.ttft_s for outcome in ok),
        tpot_ms=spread(outcome.tpot_s for outcome in ok if outcome.tpot_s is not None),
        itl_ms=spread(gap_s for outcome in ok for gap_s in outcome.itl_s),
        e2e_ms=spread(outcome.e2e_s for outcome in ok),
    )


def spread(times_s: Iterable[float]) -> Spread | None:
    times_ms = sorted(1000 * time_s for time_s in times_s)
    if not times_ms:
        return None
    return Spread(
        mean=statistics.fmean(times_ms),
        p50=percentile(times_ms, 0.5),
        p90=percentile(times_ms, 0.9),
        p99=percentile(times_ms, 0.99),
    )


def percentile(ascending: Sequence[float], share: float) -> float:
    """By nearest rank: the smallest value that at least ``share`` of all do not exceed."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]
