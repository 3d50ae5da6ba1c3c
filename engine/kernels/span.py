"""Which tokens of a step belong to one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One row's new tokens: ``first .. first + num_new - 1`` of the step's tokens, which are the
    positions ``start .. start + num_new - 1`` of a sequence with this block table. Each attends
    to itself and to all positions before it."""

    first: int
    num_new: int
    start: int
    block_ids: Sequence[int]

    @property
    def context(self) -> int:
        """Tokens in the cache once this step's are written."""
        return self.start + self.num_new
