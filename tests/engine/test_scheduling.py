"""Random schedules on a simulated clock, without a model: what must hold for each of them."""

import random
from dataclasses import dataclass, field

import pytest

from common.types import (
    ImportReady,
    SamplingParams,
    SequenceFailed,
    SequenceId,
    SequenceOutput,
    SequenceSpec,
)
from engine.batch import Batch, RowResult
from engine.block_pool import BlockPool
from engine.block_tables import AllocatorKind
from engine.engine import Engine
from engine.prefix_cache import PrefixCache
from engine.scheduler import SchedulerConfig
from engine.sequence import Sequence

BLOCK_SIZE = 4
STOP_ID = 0


class CountingRunner:
    """Ids follow from sequence and position; checks each batch against the budget."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.trace: list[tuple[int, int, int]] = []

    @property
    def vocab_size(self) -> int:
        return 50

    def launch(self, batch: Batch) -> "CountingRunner._Step":
        assert sum(len(row.token_ids) for row in batch.rows) <= self._config.step_budget
        assert len(batch.rows) <= self._config.max_running
        assert len({row.seq_id for row in batch.rows}) == len(batch.rows)
        results = []
        for row in batch.rows:
            end = row.start + len(row.token_ids)
            assert len(row.block_ids) * BLOCK_SIZE >= end
            assert 0 not in row.block_ids
            self.trace.append((row.seq_id, row.start, end))
            token_id = (row.seq_id * 31 + end * 17) % self.vocab_size
            results.append(RowResult((token_id,)) if row.sample else RowResult())
        return self._Step(results)

    def copy_block(self, source: int, target: int) -> None:
        assert source != target

    class _Step:
        def __init__(self, results: list[RowResult]) -> None:
            self._results = results

        def collect(self) -> list[RowResult]:
            return self._results


@dataclass
class Simulation:
    """Sequences arrive, are imported, aborted, leased, at random; time is the number of rounds."""

    seed: int
    now_s: float = 0.0
    live: dict[SequenceId, SequenceSpec] = field(default_factory=dict)
    first_rows: list[SequenceId] = field(default_factory=list)
    copies: list[tuple[float, SequenceId]] = field(default_factory=list)
    leases: list[tuple[float, SequenceId]] = field(default_factory=list)
    imports: set[SequenceId] = field(default_factory=set)
    # Who stepped aside in the present step.
    followers: set[SequenceId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        choose = self.random.choice
        self.config = SchedulerConfig(
            max_num_batched_tokens=choose([3, 8, 64]),
            max_num_seqs=choose([1, 4, 16]),
            max_model_len=64,
            enable_chunked_prefill=choose([True, True, False]),
            max_num_partial_prefills=choose([1, 2, 4]),
            max_preemptions=choose([0, 1, 3]),
            allocator=choose([*AllocatorKind, AllocatorKind.PAGED]),
            async_depth=choose([0, 1]),
        )
        num_blocks = choose([8, 13, 30])
        self.pool = BlockPool(
            num_blocks,
            BLOCK_SIZE,
            prefix=PrefixCache(num_blocks) if self.random.random() < 0.7 else None,
            clock=lambda: self.now_s,
        )
        self.runner = CountingRunner(self.config)
        self.engine = Engine(self.runner, self.pool, self.config, lambda: self.now_s, True)
        self._watch_followers()
        self.next_index: dict[SequenceId, int] = {}
        self.num_ended = 0
        self.num_added = 0

    def run(self, num_sequences: int = 25) -> None:
        for _ in range(5000):
            self.now_s += 1.0
            if self.num_added < num_sequences and self.random.random() < 0.5:
                self._arrive()
            if self.live and self.random.random() < 0.05:
                self._abort()
            self._settle_what_is_due()
            if self.engine.has_work:
                self._step()
            self.pool.check()
            if self.num_added == num_sequences and not (self.live or self.copies or self.leases):
                break
        else:
            raise AssertionError(f"seed {self.seed}: {len(self.live)} sequences never end")
        while self.engine.has_work:
            self.engine.step()
        counts = self.pool.counts()
        assert counts.free + counts.cached == counts.total, f"seed {self.seed}: {counts}"

    def _watch_followers(self) -> None:
        flights = self.engine._scheduler._flights
        follow = flights.follow

        def watched(sequence: Sequence, num_hits: int) -> bool:
            follows = follow(sequence, num_hits)
            if follows:
                self.followers.add(sequence.seq_id)
            return follows

        flights.follow = watched  # type: ignore[method-assign]

    def _arrive(self) -> None:
        self.num_added += 1
        seq_id = SequenceId(self.num_added)
        prompt = tuple(self.random.choice([1, 2]) for _ in range(self.random.randint(1, 40)))
        kind = self.random.choice(["add", "add", "import", "prefill", "resume"])
        outputs = (1,) if kind == "import" else (1, 2, 1) if kind == "resume" else ()
        spec = SequenceSpec(
            seq_id,
            f"r{seq_id}",
            1,
            prompt,
            outputs,
            SamplingParams(self.random.randint(1, 20), seed=1, stop_token_ids=(STOP_ID,)),
            priority=self.random.choice([0, 0, 0, 1]),
            prefill_only=kind == "prefill",
        )
        self.live[seq_id] = spec
        self.next_index[seq_id] = len(outputs)
        if kind == "import":
            self.imports.add(seq_id)
            self.engine.add_import(spec)
        else:
            self.engine.add(spec)

    def _abort(self) -> None:
        seq_id = self.random.choice(list(self.live))
        self.engine.abort(seq_id)
        self._ended(seq_id)

    def _ended(self, seq_id: SequenceId) -> None:
        del self.live[seq_id]
        self.num_ended += 1

    def _settle_what_is_due(self) -> None:
        for due_s, seq_id in [copy for copy in self.copies if copy[0] <= self.now_s]:
            self.copies.remove((due_s, seq_id))
            if self.random.random() < 0.8:
                self.engine.finish_import(seq_id)
            else:
                self.engine.drop_import(seq_id)
                if seq_id in self.live:
                    self._ended(seq_id)
        for due_s, seq_id in [lease for lease in self.leases if lease[0] <= self.now_s]:
            self.leases.remove((due_s, seq_id))
            self.engine.release_lease(seq_id)

    def _step(self) -> None:
        scheduler = self.engine._scheduler
        # Those whose next token is due: they must get it now, or give their blocks back.
        due = [s for s in scheduler.running.values() if s.num_pending() == 1]
        in_line = {s.seq_id: s for s in scheduler.waiting}
        self.followers.clear()
        num_before = len(self.runner.trace)
        events, _ = self.engine.step()
        served = [row[0] for row in self.runner.trace[num_before:]]
        for sequence in due:
            ended = sequence.seq_id not in scheduler.running
            assert sequence.seq_id in served or ended, f"seed {self.seed}: a decode starved"
        for seq_id in served:
            if seq_id not in self.first_rows:
                self.first_rows.append(seq_id)
                self._assert_nobody_was_overtaken(seq_id, in_line)
        for event in events:
            self._on_event(event)

    def _assert_nobody_was_overtaken(
        self, seq_id: SequenceId, in_line: dict[SequenceId, Sequence]
    ) -> None:
        """Of those who stood in line with it and still do, none had a better claim; but for those
        who stepped aside in this step, for a leader that is through already."""
        started = in_line.get(seq_id)
        passed = in_line.keys() - self.followers
        for waiting in self.engine._scheduler.waiting:
            if started is not None and waiting.seq_id in passed:
                assert started.queue_key < waiting.queue_key, f"seed {self.seed}: overtaken"

    def _on_event(self, event: object) -> None:
        delay_s = self.random.randint(1, 20)
        if isinstance(event, ImportReady):
            self.copies.append((self.now_s + delay_s, event.seq_id))
        elif isinstance(event, SequenceFailed):
            assert event.reason == "too_large"
            self._ended(event.seq_id)
        elif isinstance(event, SequenceOutput):
            assert event.index == self.next_index[event.seq_id]
            self.next_index[event.seq_id] += len(event.token_ids)
            if event.held:
                self.leases.append((self.now_s + delay_s, event.seq_id))
            if event.held or event.finish_reason is not None:
                self._ended(event.seq_id)


def check_seeds(seeds: range) -> None:
    for seed in seeds:
        simulation = Simulation(seed)
        simulation.run()
        assert simulation.num_ended == simulation.num_added, f"seed {seed}"


@pytest.mark.fault("F17", "F18")
def test_every_sequence_ends_in_turn_within_budget_and_without_starving() -> None:
    check_seeds(range(300))


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 11_000, 1000))
@pytest.mark.fault("F17", "F18")
def test_ten_thousand_schedules(first: int) -> None:
    check_seeds(range(first, first + 1000))


def test_plans_are_a_function_of_the_seed() -> None:
    for seed in range(20):
        one, two = Simulation(seed), Simulation(seed)
        one.run()
        two.run()
        assert one.runner.trace == two.runner.trace
