"""How sequences end: stops, limits, aborts in every state, failures; and what they cost."""

from dataclasses import replace

import pytest
from support.engines import (
    GREEDY,
    SEEDED,
    VOCAB_SIZE,
    Rig,
    prefill_for_hand_off,
    prompt_of,
    right_ids,
    spec_of,
)

from common.types import FinishReason, ImportReady
from engine.batch import Batch, RowResult
from engine.oracle import OracleRunner, reference_ids
from engine.runner import StepHandle


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stop_token_ends_at_that_token(depth: int) -> None:
    prompt = prompt_of(1, 9)
    free = right_ids(spec_of(prompt, SEEDED))
    stop = replace(SEEDED, stop_token_ids=(VOCAB_SIZE + 1, free[4]))
    rig = Rig(async_depth=depth)
    # A neighbour goes on, so that the dropped token's step is a shared one.
    spec, neighbour = spec_of(prompt, stop), spec_of(prompt_of(2, 5), SEEDED)
    rig.run(spec, neighbour)
    assert rig.ids(spec) == free[:5]
    assert rig.last(spec).finish_reason is FinishReason.STOP
    assert rig.last(spec).matched_token_id == free[4]
    rig.assert_right([neighbour])
    rig.assert_idle()


def test_blocks_of_a_stopped_sequence_go_back_at_collect() -> None:
    prompt = prompt_of(1, 9)
    free = right_ids(spec_of(prompt, SEEDED))
    rig = Rig(async_depth=1)
    spec = spec_of(prompt, replace(SEEDED, stop_token_ids=(free[3],)))
    rig.engine.add(spec)
    while not (rig.outputs(spec) and rig.last(spec).finish_reason):
        rig.step()
    assert rig.pool.counts().in_use > 0, "a launched step still writes to them"
    rig.run()
    assert rig.ids(spec) == free[:4]
    rig.assert_idle()


def test_min_tokens_holds_stop_tokens_back() -> None:
    prompt = prompt_of(1, 9)
    free = right_ids(spec_of(prompt, GREEDY))
    rig = Rig()
    params = replace(GREEDY, stop_token_ids=(free[2],), min_tokens=8)
    spec = spec_of(prompt, params)
    rig.run(spec)
    assert rig.ids(spec) == reference_ids(prompt, params, VOCAB_SIZE)
    assert len(rig.ids(spec)) >= 8
    assert free[2] not in rig.ids(spec)[:7]


@pytest.mark.parametrize("depth", [0, 1])
def test_limits(depth: int) -> None:
    rig = Rig(async_depth=depth, max_model_len=24)
    by_tokens = spec_of(prompt_of(1, 9), replace(GREEDY, max_tokens=1))
    by_length = spec_of(prompt_of(1, 20), replace(GREEDY, max_tokens=100))
    rig.run(by_tokens, by_length)
    assert len(rig.ids(by_tokens)) == 1
    assert len(rig.ids(by_length)) == 4
    for spec in (by_tokens, by_length):
        assert rig.last(spec).finish_reason is FinishReason.LENGTH
    rig.assert_idle()


class HistoryCheck:
    """Looks at launch, as a runner may, for the tokens that penalties are made of."""

    def __init__(self, oracle: OracleRunner) -> None:
        self._oracle = oracle

    @property
    def vocab_size(self) -> int:
        return self._oracle.vocab_size

    def launch(self, batch: Batch) -> StepHandle:
        for row in batch.rows:
            if row.sample is not None and row.sample.params.presence_penalty:
                assert len(row.sample.token_ids) == row.sample.position
        return self._oracle.launch(batch)

    def copy_block(self, source: int, target: int) -> None:
        self._oracle.copy_block(source, target)


def test_penalties_see_every_token_at_depth_1() -> None:
    params = replace(SEEDED, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.3)
    rig = Rig(async_depth=1, wrap=HistoryCheck)
    specs = [spec_of(prompt_of(i, 5 + i), params if i % 2 else SEEDED) for i in range(4)]
    rig.run(*specs)
    rig.assert_right(specs)
    rig.assert_idle()


@pytest.mark.parametrize("chunk", [3, 512])
def test_prompt_logprobs_without_an_output_token(chunk: int) -> None:
    rig = Rig(max_num_batched_tokens=chunk)
    prompt = prompt_of(1, 10)
    warm = spec_of(prompt, GREEDY)
    rig.run(warm)
    spec = spec_of(prompt, replace(GREEDY, max_tokens=0, prompt_logprobs=2))
    rig.run(spec)
    output = rig.last(spec)
    assert (output.token_ids, output.finish_reason) == ((), FinishReason.LENGTH)
    assert [entry.token_id for entry in output.prompt_logprobs] == list(prompt)
    assert output.prompt_logprobs[0].logprob is None
    for position, entry in enumerate(output.prompt_logprobs[1:], start=1):
        best = reference_ids(prompt[:position], replace(GREEDY, max_tokens=1), VOCAB_SIZE)
        assert entry.top[0][0] == best[0]
        assert len(entry.top) == 2
        assert entry.logprob is not None
        assert entry.logprob <= entry.top[0][1]
    assert rig.last(spec).counts.cached == 0, "a hit would leave positions without logits"
    rig.assert_idle()


def test_prompt_logprobs_come_once_and_survive_preemption_in_mid_prompt() -> None:
    rig = Rig(12, max_num_batched_tokens=2)
    growing = spec_of(prompt_of(1, 4), replace(SEEDED, max_tokens=36))
    rig.engine.add(growing)
    for _ in range(3):
        rig.step()
    spec = spec_of(prompt_of(2, 26), replace(SEEDED, max_tokens=4, prompt_logprobs=0))
    rig.run(spec)
    first, *rest = rig.outputs(spec)
    assert first.counts.preemptions == 1
    assert 0 < first.counts.recomputed < 26
    assert [entry.token_id for entry in first.prompt_logprobs] == list(spec.prompt_ids)
    assert not any(output.prompt_logprobs for output in rest)
    rig.assert_right([growing, spec])
    rig.assert_idle()


def test_logprobs_come_with_each_token() -> None:
    rig = Rig()
    spec = spec_of(prompt_of(1, 9), replace(SEEDED, logprobs=3))
    rig.run(spec)
    assert all(output.logprobs[0].token_id == output.token_ids[0] for output in rig.outputs(spec))
    assert len(rig.last(spec).logprobs[0].top) == 3


def test_what_never_fits_is_refused_at_once() -> None:
    rig = Rig(9, max_model_len=64)
    fits = spec_of(prompt_of(1, 20), replace(GREEDY, max_tokens=13))
    for too_large in (
        spec_of(prompt_of(1, 20), replace(GREEDY, max_tokens=14)),
        spec_of(prompt_of(1, 64), GREEDY),
    ):
        rig.run(too_large)
        assert [(f.seq_id, f.reason) for f in rig.failures()] == [(too_large.seq_id, "too_large")]
        rig.events.clear()
    rig.run(fits)
    rig.assert_right([fits])
    rig.assert_idle()


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_an_id_out_of_the_vocabulary_never_reaches_the_model(token_id: int) -> None:
    rig = Rig()
    spec, good = spec_of((1, token_id, 2)), spec_of(prompt_of(1, 5), SEEDED)
    rig.run(spec, good)
    assert [(f.seq_id, f.reason) for f in rig.failures()] == [(spec.seq_id, "failed")]
    rig.assert_right([good])
    rig.assert_idle()


def test_a_resume_that_is_already_complete_ends_without_a_token() -> None:
    rig = Rig()
    spec = spec_of(prompt_of(1, 5), replace(GREEDY, max_tokens=2), output_ids=(1, 2))
    rig.run(spec)
    assert (rig.last(spec).token_ids, rig.last(spec).finish_reason) == ((), FinishReason.LENGTH)
    rig.assert_idle()


# ---------------------------------------------------------------- aborts


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_steps", range(8))
def test_abort_after_any_number_of_steps(num_steps: int, depth: int) -> None:
    rig = Rig(12, async_depth=depth, max_num_batched_tokens=8)
    specs = [spec_of(prompt_of(i, 10), SEEDED) for i in range(4)]
    for spec in specs:
        rig.engine.add(spec)
    for _ in range(num_steps):
        rig.step()
    for spec in specs[::2]:
        rig.engine.abort(spec.seq_id)
        rig.engine.abort(spec.seq_id)
    num_before = {spec.seq_id: len(rig.ids(spec)) for spec in specs}
    rig.run()
    for spec in specs[::2]:
        assert len(rig.ids(spec)) == num_before[spec.seq_id], "no token after an abort"
    rig.assert_right(specs[1::2])
    rig.assert_idle()


@pytest.mark.parametrize("when", ["waiting", "importing", "aborted", "running"])
def test_abort_of_an_import(when: str) -> None:
    source, target = Rig(), Rig()
    spec = spec_of(prompt_of(1, 10), SEEDED)
    first = prefill_for_hand_off(source, spec)
    decode = replace(spec, output_ids=first.token_ids)
    target.engine.add_import(decode)
    if when == "waiting":
        target.engine.abort(spec.seq_id)
        target.run()
        target.assert_idle()
        return
    target.until(ImportReady, spec.seq_id)
    if when == "running":
        target.engine.finish_import(spec.seq_id)
        target.step()
        target.engine.abort(spec.seq_id)
    elif when == "aborted":
        target.engine.abort(spec.seq_id)
        assert target.pool.counts().importing == 3, "quarantined until the copy has returned"
        assert target.pool.counts().in_use == 0
        # The copy turns out well, too late.
        target.engine.finish_import(spec.seq_id)
    else:
        target.engine.drop_import(spec.seq_id)
    target.run()
    assert target.pool.counts().cached == (2 if when == "running" else 0)
    target.assert_idle()


# ---------------------------------------------------------------- failures


class FailingRunner:
    """Gives a row error for one sequence's ``nth`` row from now on."""

    def __init__(self, oracle: OracleRunner) -> None:
        self._oracle = oracle
        self.victim: int | None = None

    @property
    def vocab_size(self) -> int:
        return self._oracle.vocab_size

    def launch(self, batch: Batch) -> StepHandle:
        return _FailingStep(self._oracle.launch(batch), batch, self.victim)

    def copy_block(self, source: int, target: int) -> None:
        self._oracle.copy_block(source, target)


class _FailingStep:
    def __init__(self, step: StepHandle, batch: Batch, victim: int | None) -> None:
        self._step = step
        self._batch = batch
        self._victim = victim

    def collect(self) -> list[RowResult]:
        results = self._step.collect()
        for index, row in enumerate(self._batch.rows):
            if row.seq_id == self._victim:
                results[index] = RowResult(error="logits are not finite")
        return results


@pytest.mark.parametrize("depth", [0, 1])
def test_a_row_error_fails_only_that_sequence_and_caches_nothing_of_it(depth: int) -> None:
    runners: list[FailingRunner] = []

    def wrap(oracle: OracleRunner) -> FailingRunner:
        runners.append(FailingRunner(oracle))
        return runners[-1]

    rig = Rig(wrap=wrap, async_depth=depth)
    bad, good = spec_of(prompt_of(1, 12), SEEDED), spec_of(prompt_of(2, 12), SEEDED)
    rig.engine.add(bad)
    rig.engine.add(good)
    for _ in range(4):
        rig.step()
    runners[0].victim = bad.seq_id
    rig.run()
    assert [(f.seq_id, f.reason) for f in rig.failures()] == [(bad.seq_id, "failed")]
    rig.assert_right([good])
    rig.assert_idle()
    again = spec_of(bad.prompt_ids, SEEDED)
    rig.run(again)
    assert rig.last(again).counts.cached == 0
    rig.assert_right([again])


# ---------------------------------------------------------------- leases, room, books
