"""A draft model with its own cache: the oracle drafts for itself, so that one block that does not
follow acceptance, or one token read wrongly, costs acceptance."""

import random
from dataclasses import replace

import pytest
import torch
from support.engines import (
    SEEDED,
    VOCAB_SIZE,
    Rig,
    hand_over,
    prefill_for_hand_off,
    prompt_of,
    right_ids,
    spec_of,
)

from engine.batch import Batch, RowResult
from engine.block_pool import BlockPool
from engine.oracle import OracleRunner, oracle_layout
from engine.pace import Pace
from engine.speculation.draft_model import DraftProposer
from engine.speculation.statistics import SpeculationStatistics


class Spoiled(OracleRunner):
    """Some of its tokens are wrong; it notes how many it gave, and how many of them were right."""

    rate = 0.0

    def launch(self, batch: Batch):  # type: ignore[no-untyped-def]
        step = super().launch(batch)
        collect = step.collect
        rng = self.rng

        def spoiled() -> list[RowResult]:
            results = collect()
            for result in results:
                if result.token_ids and rng.random() < self.rate:
                    result.token_ids = ((result.token_ids[0] + 1) % VOCAB_SIZE,)
            return results

        step.collect = spoiled  # type: ignore[method-assign]
        return step

    rng = random.Random(3)


class Drafted:
    """A rig whose draft model is the oracle over a pool of its own."""

    def __init__(self, num_draft_blocks: int = 128, rate: float = 0.0, **config: object) -> None:
        storage = torch.full((num_draft_blocks, *oracle_layout(4).block_shape), float("nan"))
        runner = Spoiled(storage, VOCAB_SIZE, Pace(0.0))
        runner.rate = rate
        self.pool = BlockPool(num_draft_blocks, 4, "draft", on_free=runner.poison)
        self.proposer = DraftProposer(runner, self.pool, max_model_len=1000)
        self.rig = Rig(proposer=self.proposer, **config)  # type: ignore[arg-type]

    @property
    def statistics(self) -> SpeculationStatistics:
        speculation = self.rig.engine.statistics().speculation
        assert speculation is not None
        return speculation

    def assert_idle(self) -> None:
        self.rig.assert_idle()
        self.pool.check()
        assert self.pool.counts().in_use == 0


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 15, 16, 17, 18, 40])
def test_the_target_as_its_own_draft_is_always_accepted(num_tokens: int) -> None:
    drafted = Drafted()
    spec = spec_of(prompt_of(num_tokens, num_tokens), replace(SEEDED, max_tokens=30))
    drafted.rig.run(spec)
    drafted.rig.assert_right([spec])
    assert drafted.statistics.num_accepted_tokens == drafted.statistics.num_draft_tokens > 20
    drafted.assert_idle()


@pytest.mark.parametrize("penalty", [0.0, 0.6])
def test_the_cache_follows_acceptance(penalty: float) -> None:
    """Wrong drafts are written over: what comes behind them is as right as ever."""
    drafted = Drafted(rate=0.3, max_drafts=4)
    specs = [
        spec_of(prompt_of(n, 5 + n), replace(SEEDED, max_tokens=60, frequency_penalty=penalty))
        for n in range(4)
    ]
    drafted.rig.run(*specs)
    drafted.rig.assert_right(specs)
    first, *_ = drafted.statistics.accepted_by_position
    assert first / drafted.statistics.num_drafts == pytest.approx(0.7, abs=0.15)
    drafted.assert_idle()


def test_a_prompt_is_read_in_chunks_and_drafted_only_then() -> None:
    drafted = Drafted(max_num_batched_tokens=16)
    spec = spec_of(prompt_of(7, 60), replace(SEEDED, max_tokens=30))
    drafted.rig.run(spec)
    drafted.rig.assert_right([spec])
    steps = [record.num_draft_tokens for record in drafted.rig.records if record.num_decode_tokens]
    assert steps[:3] == [0, 0, 0]
    assert max(steps) == 5
    drafted.assert_idle()


def test_preempted_and_resumed() -> None:
    drafted = Drafted(num_blocks=15, rate=0.1)
    specs = [spec_of(prompt_of(i, 6 + i), replace(SEEDED, max_tokens=20)) for i in range(6)]
    drafted.rig.run(*specs)
    assert drafted.rig.engine.statistics().preemptions > 0
    drafted.rig.assert_right(specs)
    drafted.assert_idle()


def test_a_pool_too_small_for_all_costs_drafts_and_nothing_else() -> None:
    drafted = Drafted(num_draft_blocks=10)
    specs = [spec_of(prompt_of(i, 12), replace(SEEDED, max_tokens=20)) for i in range(5)]
    drafted.rig.run(*specs)
    drafted.rig.assert_right(specs)
    assert 0 < drafted.statistics.num_draft_tokens < 5 * 20
    drafted.assert_idle()


def test_longer_than_the_drafts_context() -> None:
    drafted = Drafted(num_draft_blocks=5)  # 16 tokens
    spec = spec_of(prompt_of(1, 8), replace(SEEDED, max_tokens=24))
    drafted.rig.run(spec)
    drafted.rig.assert_right([spec])
    assert drafted.statistics.num_accepted_tokens == drafted.statistics.num_draft_tokens > 0
    drafted.assert_idle()


def test_a_sequence_handed_over_is_read_here_first() -> None:
    source, drafted = Rig(), Drafted()
    spec = spec_of(prompt_of(2, 21), replace(SEEDED, max_tokens=24))
    first = prefill_for_hand_off(source, spec)
    decode = hand_over(source, drafted.rig, spec, first)
    drafted.rig.run()
    assert [*first.token_ids, *drafted.rig.ids(decode)] == right_ids(spec)
    assert drafted.statistics.num_accepted_tokens == drafted.statistics.num_draft_tokens > 10
    drafted.assert_idle()


def test_an_abort_gives_both_pools_their_blocks_back() -> None:
    drafted = Drafted()
    spec = spec_of(prompt_of(2, 9), replace(SEEDED, max_tokens=24))
    drafted.rig.engine.add(spec)
    for _ in range(3):
        drafted.rig.step()
    assert drafted.pool.counts().in_use > 0
    drafted.rig.engine.abort(spec.seq_id)
    drafted.assert_idle()
