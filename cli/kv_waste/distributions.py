"""Built-in length distributions, each made from the figures that one paper prints.

Where a paper prints one figure for a length (mean or median), the length is exponential, the least
presuming distribution on the positive numbers with that figure; where it prints a median and a 90th
percentile, it is log-normal through both. Nothing else is fitted, and nothing was adjusted after a
replay. Prompt and output are drawn independently.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from cli.kv_waste.workload import Request, Workload, bounded
from common.errors import ConfigError

NUM_REQUESTS = 2000
# Requests arrive as a Poisson process this many times faster than a perfect allocator could serve
# them, so that memory is what limits and the queue is never empty.
OVERLOAD = 4.0
# Standard normal distribution's 90th percentile.
_Z90 = 1.2815515655446004

Length = Callable[[random.Random], float]


def _exponential(mean: float) -> Length:
    return lambda draw: draw.expovariate(1 / mean)


def _exponential_of_median(median: float) -> Length:
    return _exponential(median / math.log(2))


def _log_normal(median: float, p90: float) -> Length:
    mu, sigma = math.log(median), math.log(p90 / median) / _Z90
    return lambda draw: draw.lognormvariate(mu, sigma)


@dataclass(frozen=True, slots=True)
class Distribution:
    """``max_len``: longest prompt + output that the source's experiments served."""

    prompt: Length
    output: Length
    max_len: int
    source: str


DISTRIBUTIONS = {
    "chat": Distribution(
        _exponential(161.31),
        _exponential(337.99),
        2048,
        "ShareGPT, means of Kwon et al. 2023 (PagedAttention, arXiv 2309.06180), figure 11a",
    ),
    "summarisation": Distribution(
        _log_normal(7059, 12985),
        _log_normal(208, 371),
        16384,
        "arxiv_summarization, medians and 90th percentiles of Agrawal et al. 2024 (Sarathi-Serve, "
        "arXiv 2403.02310), table 2",
    ),
    "code": Distribution(
        _exponential_of_median(1500),
        _exponential_of_median(13),
        8192,
        "Azure coding service, medians of Patel et al. 2024 (Splitwise, arXiv 2311.18677), "
        "section III-A",
    ),
}


def generate(
    name: str, seed: int, num_slots: int, max_len: int | None, shared_prefix: int
) -> Workload:
    """Requests of one distribution, the same for the same arguments. Each prompt begins with the
    same ``shared_prefix`` tokens (a system prompt), on top of the drawn length; ``num_slots`` of
    memory set the pace of arrivals. Raises ConfigError for an unknown name."""
    if name not in DISTRIBUTIONS:
        raise ConfigError("distribution", f"{name!r} is none of {', '.join(DISTRIBUTIONS)}")
    distribution = DISTRIBUTIONS[name]
    draw = random.Random(seed)
    prefix_ids = (0,) if shared_prefix else ()
    lengths = [
        (shared_prefix + _whole(distribution.prompt(draw)), _whole(distribution.output(draw)))
        for _ in range(NUM_REQUESTS)
    ]
    slot_steps = sum(output * (prompt + (output - 1) / 2) for prompt, output in lengths)
    interval = slot_steps / NUM_REQUESTS / num_slots / OVERLOAD
    requests, clock = [], 0.0
    for prompt, output in lengths:
        clock += draw.expovariate(1 / interval)
        requests.append(Request(math.ceil(clock), prompt, output, prefix_ids))
    if shared_prefix:
        name = f"{name} behind {shared_prefix:,} common tokens"
    return bounded(name, requests, max_len or distribution.max_len, max(shared_prefix, 1))


def _whole(length: float) -> int:
    return max(1, round(length))
