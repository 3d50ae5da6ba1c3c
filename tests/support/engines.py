"""Engines over the oracle model for tests, and what every test ends with: nothing leaked."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import count

import torch

from common.block_keys import block_key
from common.types import (
    EngineEvent,
    ImportReady,
    SamplingParams,
    SequenceFailed,
    SequenceId,
    SequenceOutput,
    SequenceSpec,
    StepRecord,
    TokenId,
)
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.oracle import OracleRunner, oracle_layout, reference_ids
from engine.pace import Pace
from engine.prefix_cache import KeyFunction, PrefixCache
from engine.runner import ModelRunner
from engine.scheduler import SchedulerConfig
from engine.speculation.lengths import DraftLengths
from engine.speculation.proposer import Proposer
from engine.speculation.speculator import Speculator

VOCAB_SIZE = 512
GREEDY = SamplingParams(max_tokens=16, seed=0, temperature=0.0)
SEEDED = SamplingParams(max_tokens=16, seed=7, temperature=0.8)

_seq_ids = count(1)


class StepClock:
    """Simulated time: moves by one microsecond a reading, so that nothing happens at once."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s


def spec_of(
    prompt_ids: Sequence[TokenId],
    params: SamplingParams = GREEDY,
    output_ids: Sequence[TokenId] = (),
    **changes: object,
) -> SequenceSpec:
    seq_id = SequenceId(next(_seq_ids))
    spec = SequenceSpec(seq_id, f"r{seq_id}", 1, tuple(prompt_ids), tuple(output_ids), params)
    return replace(spec, **changes)  # type: ignore[arg-type]


def right_ids(spec: SequenceSpec) -> list[TokenId]:
    """Output ids of a spec by the reference, those it starts with left out."""
    return list(_reference(spec.prompt_ids, spec.params, spec.output_ids)[len(spec.output_ids) :])


@cache
def _reference(
    prompt_ids: tuple[TokenId, ...], params: SamplingParams, output_ids: tuple[TokenId, ...]
) -> tuple[TokenId, ...]:
    """Tests ask for the same answer by many ways."""
    return tuple(reference_ids(prompt_ids, params, VOCAB_SIZE, output_ids))


def prompt_of(seed: int, num_tokens: int) -> tuple[TokenId, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator).tolist())


class Rig:
    """One engine over the oracle model. ``outputs`` and ``ended`` collect what its steps gave."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        caching: bool = True,
        key_function: KeyFunction = block_key,
        wrap: Callable[[OracleRunner], ModelRunner] = lambda runner: runner,
        proposer: Proposer | None = None,
        max_drafts: int = 5,
        lengths: DraftLengths | None = None,
        **config: object,
    ) -> None:
        self.clock = StepClock()
        self.layout = oracle_layout(block_size)
        # What was in memory before must not matter.
        self.storage = torch.full((num_blocks, *self.layout.block_shape), float("nan"))
        self.oracle = OracleRunner(self.storage, VOCAB_SIZE, Pace(0.0))
        prefix = PrefixCache(num_blocks, key_function) if caching else None
        self.pool = BlockPool(
            num_blocks, block_size, "oracle", prefix, self.oracle.poison, self.clock
        )
        settings = SchedulerConfig(**config)  # type: ignore[arg-type]
        self.speculator = None
        if proposer is not None:
            self.speculator = Speculator(proposer, max_drafts, VOCAB_SIZE, lengths, self.clock)
        self.engine = Engine(
            wrap(self.oracle), self.pool, settings, self.clock, True, self.speculator
        )
        self.events: list[EngineEvent] = []
        self.records: list[StepRecord] = []

    # ------------------------------------------------------------ running

    def step(self) -> list[EngineEvent]:
        events, record = self.engine.step()
        self.events += events
        if record is not None:
            self.records.append(record)
        return events

    def run(self, *specs: SequenceSpec, limit: int = 10_000) -> None:
        """Adds the sequences and steps until the engine has nothing to do."""
        for spec in specs:
            self.engine.add(spec)
        for _ in range(limit):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {limit} steps")

    def until(self, kind: type[EngineEvent], seq_id: SequenceId) -> EngineEvent:
        for _ in range(1000):
            for event in self.step():
                if isinstance(event, kind) and event.seq_id == seq_id:
                    return event
        raise AssertionError(f"no {kind.__name__} of {seq_id}")

    # ------------------------------------------------------------ what came out

    def outputs(self, spec: SequenceSpec) -> list[SequenceOutput]:
        return [
            event
            for event in self.events
            if isinstance(event, SequenceOutput) and event.seq_id == spec.seq_id
        ]

    def ids(self, spec: SequenceSpec) -> list[TokenId]:
        """Its output ids; each index must come once, in order."""
        ids: list[TokenId] = []
        for output in self.outputs(spec):
            assert output.index == len(spec.output_ids) + len(ids)
            ids += output.token_ids
        return ids

    def last(self, spec: SequenceSpec) -> SequenceOutput:
        return self.outputs(spec)[-1]

    def failures(self) -> list[SequenceFailed]:
        return [event for event in self.events if isinstance(event, SequenceFailed)]

    def assert_right(self, specs: Iterable[SequenceSpec]) -> None:
        for spec in specs:
            assert self.ids(spec) == right_ids(spec)

    def assert_idle(self) -> None:
        """Nothing leaked: every block is free or cached, and the books agree."""
        self.pool.check()
        counts = self.pool.counts()
        assert (counts.in_use, counts.leased, counts.importing) == (0, 0, 0)
        assert counts.free + counts.cached == counts.total
        statistics = self.engine.statistics()
        assert statistics.num_running == statistics.num_waiting == 0
        assert statistics.num_importing == statistics.num_leased == 0
        assert not self.engine.has_work


def prefill_for_hand_off(source: Rig, spec: SequenceSpec) -> SequenceOutput:
    """Runs a prompt with its blocks left under a lease (if the first token did not end it)."""
    prefill = replace(spec, prefill_only=True)
    source.engine.add(prefill)
    output = source.until(SequenceOutput, spec.seq_id)
    assert isinstance(output, SequenceOutput)
    return output


def hand_over(source: Rig, target: Rig, spec: SequenceSpec, first: SequenceOutput) -> SequenceSpec:
    """Copies what ``first`` holds into the target engine, as the workers would; returns the spec
    that now runs there."""
    decode = replace(spec, output_ids=spec.output_ids + first.token_ids)
    target.engine.add_import(decode)
    ready = target.until(ImportReady, spec.seq_id)
    assert isinstance(ready, ImportReady)
    for move in ready.moves:
        target.storage[move.target.block_id] = source.storage[first.held[move.index].block_id]
    source.engine.release_lease(spec.seq_id)
    target.engine.finish_import(spec.seq_id)
    return decode
