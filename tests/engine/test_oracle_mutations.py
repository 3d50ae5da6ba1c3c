"""Each mistake that can be made with a block must change the oracle's text."""

from collections.abc import Callable

import pytest
import torch
from support.engines import (
    SEEDED,
    Rig,
    hand_over,
    prefill_for_hand_off,
    prompt_of,
    right_ids,
    spec_of,
)

from engine.batch import Batch, BatchRow
from engine.oracle import OracleRunner
from engine.runner import StepHandle

PROMPT = prompt_of(4, 14)
FOREIGN = prompt_of(5, 14)


class MutatedRunner:
    """Hands every batch on with its decodes' rows changed."""

    def __init__(self, oracle: OracleRunner, change: Callable[[BatchRow], None]) -> None:
        self._oracle = oracle
        self._change = change

    @property
    def vocab_size(self) -> int:
        return self._oracle.vocab_size

    def launch(self, batch: Batch) -> StepHandle:
        for row in batch.rows:
            if row.start >= len(PROMPT):
                row.block_ids = list(row.block_ids)
                self._change(row)
        return self._oracle.launch(batch)

    def copy_block(self, source: int, target: int) -> None:
        self._oracle.copy_block(source, target)


def nothing(row: BatchRow) -> None:
    """The twin that must pass."""


def swap_blocks(row: BatchRow) -> None:
    first, second, *rest = row.block_ids
    row.block_ids = [second, first, *rest]


def skip_block(row: BatchRow) -> None:
    first, second, *rest = row.block_ids
    row.block_ids = [first, *rest, second]


def double_block(row: BatchRow) -> None:
    first, _, *rest = row.block_ids
    row.block_ids = [first, first, *rest]


def shorten(row: BatchRow) -> None:
    row.start -= 1


def is_right_with(change: Callable[[BatchRow], None]) -> bool:
    rig = Rig(wrap=lambda oracle: MutatedRunner(oracle, change))
    other, spec = spec_of(FOREIGN, SEEDED), spec_of(PROMPT, SEEDED)
    rig.run(other, spec)
    return rig.ids(spec) == right_ids(spec)


def test_the_unmutated_run_is_right() -> None:
    assert is_right_with(nothing)


@pytest.mark.parametrize("change", [swap_blocks, skip_block, double_block, shorten])
def test_a_wrong_table_or_length_changes_the_text(change: Callable[[BatchRow], None]) -> None:
    assert not is_right_with(change)


def test_a_block_freed_early_and_used_again_changes_the_text() -> None:
    rig = Rig(caching=False)
    spec = spec_of(PROMPT, SEEDED)
    rig.engine.add(spec)
    rig.step()
    holding = next(iter(rig.pool._holdings))
    victim = holding.block_ids[1]
    rig.oracle.poison([victim])
    rig.run()
    assert rig.ids(spec)[0] == right_ids(spec)[0]
    assert rig.ids(spec)[1:] != right_ids(spec)[1:]


@pytest.mark.parametrize(
    "mutate",
    [
        pytest.param("stale", id="a stale generation"),
        pytest.param("layers", id="swapped layers"),
        pytest.param("short", id="length off by one"),
    ],
)
def test_a_bad_hand_over_changes_the_text(mutate: str) -> None:
    source, target = Rig(caching=False), Rig(caching=False)
    spec = spec_of(PROMPT, SEEDED)
    first = prefill_for_hand_off(source, spec)
    held = [ref.block_id for ref in first.held]
    if mutate == "stale":
        # The lease ended and the blocks live a second life before they are read.
        source.engine.release_lease(spec.seq_id)
        second = spec_of(FOREIGN, SEEDED)
        again = prefill_for_hand_off(source, second)
        reused = {ref.block_id for ref in again.held}
        assert reused == set(held)
        assert {ref.generation for ref in again.held} == {2}
        source.engine._leases[spec.seq_id] = source.engine._leases.pop(second.seq_id)
    elif mutate == "layers":
        source.storage[held[0]] = source.storage[held[0]].flip(0).clone()
    else:
        # The last prompt token's KV is not there: its slot is as a fresh block has it.
        source.storage[held[-1], :, :, (len(PROMPT) - 1) % 4] = 0.0
    decode = hand_over(source, target, spec, first)
    target.run()
    assert target.ids(decode) != right_ids(spec)[1:]


def test_a_hand_over_copied_faithfully_is_right() -> None:
    source, target = Rig(caching=False), Rig(caching=False)
    spec = spec_of(PROMPT, SEEDED)
    decode = hand_over(source, target, spec, prefill_for_hand_off(source, spec))
    target.run()
    assert target.ids(decode) == right_ids(spec)[1:]
    assert torch.isnan(source.storage).any(), "memory is not zero before it is used"
