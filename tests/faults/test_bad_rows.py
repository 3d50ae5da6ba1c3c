"""A row that cannot be computed ends its own sequence and no other (faults.md F35, V23)."""

from dataclasses import replace

import pytest
from support.engines import GREEDY, SEEDED, VOCAB_SIZE, Rig, prompt_of, spec_of

from common import failpoints
from common.types import SequenceId, SequenceSpec
from engine.batch import Batch, RowResult
from engine.model_runner import FinishedStep
from engine.oracle import OracleRunner
from engine.row_guard import RowGuard
from engine.runner import ModelRunner, StepHandle

NUM_MATES = 7


class Broken(Exception):
    """What a kernel or a sampler might raise."""


class AroundOracle:
    """Another runner whose steps one sequence, ``bad``, spoils."""

    def __init__(self, runner: OracleRunner) -> None:
        self._runner = runner
        self.bad: SequenceId | None = None

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    def copy_block(self, source: int, target: int) -> None:
        self._runner.copy_block(source, target)


class BreaksOn(AroundOracle):
    """Raises for every step that has a row of ``bad``, at launch or at collect; for each step where
    ``bad`` is None. ``only_once``: the first time alone."""

    def __init__(self, runner: OracleRunner, at: str, only_once: bool = False) -> None:
        super().__init__(runner)
        self._at = at
        self._only_once = only_once
        self.num_raised = 0

    def launch(self, batch: Batch) -> StepHandle:
        breaks = self._breaks(batch)
        if breaks and self._at == "launch":
            raise Broken
        handle = self._runner.launch(batch)
        return _BrokenStep() if breaks else handle

    def _breaks(self, batch: Batch) -> bool:
        if self._only_once and (self.num_raised or batch.step_id < 5):
            return False
        breaks = self.bad is None or any(row.seq_id == self.bad for row in batch.rows)
        self.num_raised += breaks
        return breaks


class _BrokenStep:
    def collect(self) -> list[RowResult]:
        raise Broken


def make_rig(at: str, depth: int = 0, only_once: bool = False) -> tuple[Rig, BreaksOn]:
    made: list[BreaksOn] = []

    def wrap(runner: OracleRunner) -> ModelRunner:
        made.append(BreaksOn(runner, at, only_once))
        return RowGuard(made[0], depth)

    return Rig(256, wrap=wrap, async_depth=depth), made[0]


def make_specs() -> list[SequenceSpec]:
    """Prompts of which the first half is common."""
    common = prompt_of(0, 16)
    return [
        spec_of((*common, *prompt_of(seed, 12)), replace(SEEDED if seed % 2 else GREEDY, seed=seed))
        for seed in range(1, NUM_MATES + 2)
    ]


@pytest.mark.fault("V23", "F35")
@pytest.mark.parametrize("at", ["launch", "collect"])
@pytest.mark.parametrize("index", [0, 3, NUM_MATES])
def test_only_the_sequence_that_raises_fails(at: str, index: int) -> None:
    rig, runner = make_rig(at)
    specs = make_specs()
    bad = specs.pop(index)
    runner.bad = bad.seq_id
    rig.run(bad, *specs)
    (failure,) = rig.failures()
    assert failure.seq_id == bad.seq_id and failure.reason == "failed"
    assert "Broken" in failure.detail
    rig.assert_right(specs)
    rig.assert_idle()
    # Nothing of it can be hit: what it wrote is not to be trusted.
    assert not rig.engine.statistics().blocks.in_use


@pytest.mark.fault("V23")
@pytest.mark.parametrize(("at", "depth"), [("launch", 0), ("collect", 0), ("launch", 1)])
def test_a_fault_that_does_not_come_back_is_not_noticed(at: str, depth: int) -> None:
    rig, runner = make_rig(at, depth, only_once=True)
    specs = make_specs()
    rig.run(*specs)
    assert runner.num_raised == 1
    assert rig.failures() == []
    rig.assert_right(specs)
    rig.assert_idle()


@pytest.mark.fault("V23")
def test_a_bad_row_with_a_step_in_flight() -> None:
    rig, runner = make_rig("launch", depth=1)
    bad, *specs = make_specs()
    runner.bad = bad.seq_id
    rig.run(bad, *specs)
    assert [failure.seq_id for failure in rig.failures()] == [bad.seq_id]
    rig.assert_right(specs)
    rig.assert_idle()


@pytest.mark.fault("V23")
def test_without_the_guard_one_row_ends_all() -> None:
    """The negative twin."""
    made: list[BreaksOn] = []

    def wrap(runner: OracleRunner) -> ModelRunner:
        made.append(BreaksOn(runner, "launch"))
        return made[0]

    rig = Rig(256, wrap=wrap)
    specs = make_specs()
    made[0].bad = specs[0].seq_id
    with pytest.raises(Broken):
        rig.run(*specs)


@pytest.mark.fault("V23")
def test_failpoints_of_the_guard() -> None:
    rig = Rig(256, wrap=lambda runner: RowGuard(runner, 0))
    specs = make_specs()
    failpoints.arm("engine.step=raise@6;engine.row=raise@3")
    try:
        rig.run(*specs)
    finally:
        failpoints.arm("")
    assert [failure.seq_id for failure in rig.failures()] == [specs[2].seq_id]
    rig.assert_right(spec for spec in specs if spec is not specs[2])
    rig.assert_idle()


class WrongIds(AroundOracle):
    """Samples an id that is not in the vocabulary for one sequence, from its third token on."""

    def __init__(self, runner: OracleRunner, wrong_id: int) -> None:
        super().__init__(runner)
        self._wrong_id = wrong_id

    def launch(self, batch: Batch) -> StepHandle:
        results = self._runner.launch(batch).collect()
        for row, result in zip(batch.rows, results, strict=True):
            if row.seq_id == self.bad and row.start > 28 and result.token_ids:
                result.token_ids = (self._wrong_id,)
        return FinishedStep(results)


@pytest.mark.fault("V8")
@pytest.mark.parametrize("wrong_id", [-1, VOCAB_SIZE, 2**31 - 1])
def test_an_id_out_of_the_vocabulary_is_never_fed_back(wrong_id: int) -> None:
    made: list[WrongIds] = []

    def wrap(runner: OracleRunner) -> ModelRunner:
        made.append(WrongIds(runner, wrong_id))
        return RowGuard(made[0], 0)

    rig = Rig(256, wrap=wrap)
    bad, *specs = make_specs()
    made[0].bad = bad.seq_id
    rig.run(bad, *specs)
    assert [failure.seq_id for failure in rig.failures()] == [bad.seq_id]
    assert wrong_id not in rig.ids(bad)
    rig.assert_right(specs)
    rig.assert_idle()
