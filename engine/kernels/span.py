"""Which tokens of a step belong to one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Span:
    """One row's new tokens: ``first .. first + num_new - 1`` of the step's tokens, which are the
    positions ``start .. start + num_new - 1`` of a sequence with this block table. Each attends
    to itself and to all positions before it. Nobody changes it; one a sequence and step, so it is
    not frozen: that takes three times as long to make."""

    first: int
    num_new: int
    start: int
    block_ids: Sequence[int]

    @property
    def context(self) -> int:
        """Tokens in the cache once this step's are written."""
        return self.start + self.num_new


def block_tables(spans: Sequence[Span], block_size: int) -> Tensor:
    """int32 ``[s, width]`` on the host, padded with the null block."""
    tables = [list(span.block_ids[: -(-span.context // block_size)]) for span in spans]
    width = max(map(len, tables))
    padded = [table + [0] * (width - len(table)) for table in tables]
    return torch.tensor(padded, dtype=torch.int32)
