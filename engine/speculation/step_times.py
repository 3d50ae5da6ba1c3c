"""How long a step takes by the number of its tokens, as far as this machine has shown.

Known at the nodes below and interpolated between them. Steps of a real model are timed once before
anything is served; from then on each step that only decodes corrects the node that it is at, a
little of it all others (contexts grow, machines get busy), and what was not seen for long goes back
to the shape of the first measurement: one bad second must not count for ever.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping

from common.types import SamplingParams, SequenceId
from engine.batch import Batch, BatchRow, SampleRequest
from engine.runner import ModelRunner

NODES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_MEASURED_UP_TO = 64
_LONGEST_S = 1.0
# What one step corrects: at its own number of tokens, and everywhere.
_NEAR, _FAR = 0.2, 0.05
_RELAXATION = 0.002
# The most that one step can be wrong by, up or down.
_MAX_RATIO = 2.0


class StepTimes:
    """``measured``: seconds of steps with so many tokens, or nothing: all are taken to cost the
    same until steps show otherwise."""

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        self._has_any = bool(measured)
        self._seconds = _extended(measured or {1: 1.0})
        self._shape = list(self._seconds)

    def seconds(self, num_tokens: int) -> float:
        """Of a step with so many tokens. Without any measurement only ratios mean something."""
        above = min(bisect_right(NODES, num_tokens), len(NODES) - 1)
        low, high = NODES[above - 1], NODES[above]
        start, end = self._seconds[above - 1], self._seconds[above]
        return start + (end - start) * (num_tokens - low) / (high - low)

    def table(self, first: int, last: int) -> list[float]:
        """`seconds` of first .. last tokens, cheaper than one by one."""
        if last - first < 8:
            return [self.seconds(num_tokens) for num_tokens in range(first, last + 1)]
        table: list[float] = []
        num_tokens = first
        while num_tokens <= last:
            above = min(bisect_right(NODES, num_tokens), len(NODES) - 1)
            low, high = NODES[above - 1], NODES[above]
            start, end = self._seconds[above - 1], self._seconds[above]
            slope = (end - start) / (high - low)
            stop = last + 1 if above == len(NODES) - 1 else min(last + 1, high)
            table += [start + slope * (n - low) for n in range(num_tokens, stop)]
            num_tokens = stop
        return table

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step with so many tokens, none of them a prompt's, took this long."""
        if seconds <= 0 or num_tokens > NODES[-1]:
            return
        ratio = seconds / self.seconds(num_tokens)
        if not self._has_any:
            self._has_any = True
            self._seconds = [value * ratio for value in self._seconds]
            return
        ratio = min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO)
        nearest = _nearest(num_tokens)
        level = self._seconds[nearest] / self._shape[nearest]
        for index, node in enumerate(NODES):
            weight = _FAR + _NEAR * 4.0 ** -abs(math.log2(node / num_tokens))
            change = ratio**weight
            if index != nearest:
                away = level * self._shape[index] / self._seconds[index]
                change *= away**_RELAXATION
            self._seconds[index] *= change


def _nearest(num_tokens: int) -> int:
    above = min(bisect_right(NODES, num_tokens), len(NODES) - 1)
    return above if 2 * num_tokens > NODES[above - 1] + NODES[above] else above - 1


def _extended(measured: Mapping[int, float]) -> list[float]:
    """Values at all nodes; beyond the largest measured one, each token adds what the last did."""
    known = sorted(measured)
    last, before = known[-1], known[max(0, len(known) - 2)]
    slope = 0.0
    if last > before:
        slope = max(0.0, (measured[last] - measured[before]) / (last - before))
    return [measured.get(node, measured[last] + slope * (node - last)) for node in NODES]


def measured_step_times(
    runner: ModelRunner,
    block_size: int,
    num_blocks: int,
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, float]:
    """Seconds by number of tokens, all of them sampled, the better of two tries each. Writes into
    the pool's blocks, as `engine.step_budget` does; ``num_blocks`` counts the null block."""
    measured: dict[int, float] = {}
    for num_tokens in NODES:
        if num_tokens > min(_MEASURED_UP_TO, (num_blocks - 1) * block_size):
            break
        block_ids = range(1, -(-num_tokens // block_size) + 1)
        params = SamplingParams(max_tokens=num_tokens + 1, seed=0, temperature=0.0)
        token_ids = [0] * num_tokens
        sample = SampleRequest(params, 1, 1, token_ids)
        row = BatchRow(SequenceId(0), token_ids, 0, block_ids, sample, num_tokens - 1)
        tries = []
        for _ in range(2):
            start_s = clock()
            runner.launch(Batch(step_id=0, rows=[row])).collect()
            tries.append(clock() - start_s)
        measured[num_tokens] = min(tries)
        if measured[num_tokens] > _LONGEST_S:
            break
    return measured
