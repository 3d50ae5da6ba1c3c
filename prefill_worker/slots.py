"""When a prefill worker takes another job.

It takes one while every job that it holds has begun, or will begin in the next step: those not
begun fit into what is left of the step's tokens and into the free blocks. A job that a step has
passed over, or that does not fit, is the one job a worker may hold without starting it; until that
has begun nothing else is taken. While a gateway is being asked for a job, no other is taken; but
where the first try got no answer, that job only keeps its place and blocks, and others are taken.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from common.types import StepRecord


@dataclass(slots=True)
class _Held:
    num_tokens: int
    num_blocks: int
    num_computed: int = 0
    # When the engine was given it; None while the gateway is still being asked.
    added_s: float | None = None
    asked_in_vain: bool = False
    begun: bool = False
    passed_over: bool = False


class Slots:
    """Sans IO; times are of the engine's clock."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._max_jobs = max_num_seqs
        self._step_tokens = max_num_batched_tokens
        self._held: dict[Hashable, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_queued_tokens(self) -> int:
        """Of all jobs held here, tokens not yet computed."""
        return sum(max(0, job.num_tokens - job.num_computed) for job in self._held.values())

    def take(self, key: Hashable, num_tokens: int, num_blocks: int) -> None:
        self._held[key] = _Held(num_tokens, num_blocks)

    def asked_in_vain(self, key: Hashable) -> None:
        """Its gateway has not answered yet, and may never."""
        self._held[key].asked_in_vain = True

    def added(self, key: Hashable, now_s: float) -> None:
        self._held[key].added_s = now_s

    def drop(self, key: Hashable) -> None:
        self._held.pop(key, None)

    def computed(self, key: Hashable, num_computed: int) -> None:
        if (held := self._held.get(key)) is not None:
            held.begun = True
            held.num_computed = num_computed

    def step_done(self, record: StepRecord) -> None:
        """To be called after `computed` for each of its chunks."""
        for held in self._held.values():
            if not held.begun and held.added_s is not None and held.added_s <= record.start_s:
                held.passed_over = True

    def is_free(self, available_blocks: int) -> bool:
        """``available_blocks``: free and cached ones of the pool."""
        held = self._held.values()
        ours = [job for job in held if job.added_s is not None]
        if len(held) >= self._max_jobs:
            return False
        if any(job.added_s is None and not job.asked_in_vain for job in held):
            return False
        if sum(job.num_blocks for job in held if not job.begun) > available_blocks:
            return False
        not_begun = [job for job in ours if not job.begun]
        if not not_begun:
            return True
        if any(job.passed_over for job in not_begun):
            return False
        return sum(job.num_tokens - job.num_computed for job in ours) < self._step_tokens
