"""How many tokens a step may have here, by a clock that is made."""

from dataclasses import dataclass

import pytest

from engine.batch import Batch, RowResult
from engine.step_budget import measured_step_budget


@dataclass
class Machine:
    """A model that takes so many seconds a token, and a fixed time a step."""

    token_s: float
    step_s: float = 0.001
    now_s: float = 0.0
    vocab_size: int = 2
    largest: int = 0

    def launch(self, batch: Batch) -> "Machine":
        (row,) = batch.rows
        assert 0 not in row.block_ids and len(row.block_ids) * 16 >= len(row.token_ids)
        self.largest = max(self.largest, len(row.token_ids))
        self.now_s += self.step_s + self.token_s * len(row.token_ids)
        return self

    def collect(self) -> list[RowResult]:
        return [RowResult()]

    def copy_block(self, source: int, target: int) -> None: ...


@pytest.mark.parametrize(
    ("token_s", "budget"),
    [(0.0001, 2048), (0.0004, 512), (0.0010, 128), (0.0039, 32), (1.0, 32)],
)
def test_the_largest_power_of_two_that_stays_under_a_quarter_of_a_second(
    token_s: float, budget: int
) -> None:
    machine = Machine(token_s)
    assert measured_step_budget(machine, 16, 1000, lambda: machine.now_s) == budget
    # Nothing is computed that could take much longer than what is looked for.
    assert machine.largest <= max(32, 2 * budget)


def test_a_small_pool_bounds_it() -> None:
    machine = Machine(0.0)
    assert measured_step_budget(machine, 16, 9, lambda: machine.now_s) == 128
    assert measured_step_budget(machine, 16, 2, lambda: machine.now_s) == 32
    assert machine.largest <= 128
