"""Decides what each step computes: running decodes first, then prefills.

Life of a sequence in here::

    1. add                it waits, in one line for those to compute and one for imports: resumes
                          before new work, then by priority and age
    2. follow             its prefix is being computed by another right now: it waits beside the
                          line until that is done (engine/single_flight.py), then at its old place
    3. admission          of the older head: its whole block table, at once or not at all
                          (engine/block_tables.py); a cached prefix is shared instead of computed;
                          an import needs none of the step's budget, but waits for its copy
    4. running            each step computes what is pending: a decode its one token, the prompts
                          under way share the rest (engine/prefill_budget.py)
    5. preemption         no block left for a decode: the youngest gives all its blocks back, keeps
                          its tokens and waits again; after ``max_preemptions`` times it is spared
                          as long as there is another
    6. leave              it ended; its blocks go back once no launched step writes to them

Fairness: within a line and a priority, nobody is overtaken for want of blocks, a slot or budget.
Only two things are passed by: a follower, by sequences that share nothing with what it waits for
(it would otherwise compute the same at the same time, and has its place back as soon as that is
there); and a head that lacks budget in this step, by imports, which need none. So nobody starves.

An admission leaves one block for each running sequence to grow into, unless the pool is otherwise
idle: so at least one sequence always runs, and preempted ones do not bounce.
"""

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from common.types import SequenceId
from engine.block_pool import BlockPool
from engine.block_tables import AllocatorKind, BlockTables
from engine.plan import Plan, PlannedRow
from engine.prefill_budget import PrefillBudget
from engine.sequence import Sequence, Status
from engine.single_flight import SingleFlight


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine. ``async_depth`` is the number of steps that may be launched ahead of
    the one being collected, ``max_num_partial_prefills`` that of prompts computed in turns."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 256
    max_model_len: int = 8192
    enable_chunked_prefill: bool = True
    max_num_partial_prefills: int = 4
    max_preemptions: int = 3
    allocator: AllocatorKind = AllocatorKind.PAGED
    async_depth: int = 0

    @property
    def max_running(self) -> int:
        """Every running sequence can have a token in each step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def step_budget(self) -> int:
        """Tokens a step. Without chunks the longest prompt must fit into one, beside decodes."""
        if self.enable_chunked_prefill:
            return self.max_num_batched_tokens
        return max(self.max_num_batched_tokens, self.max_model_len + self.max_running)


class Scheduler:
    """``copy_block`` copies one block inside the pool (copy-on-write)."""

    def __init__(
        self,
        pool: BlockPool,
        config: SchedulerConfig,
        copy_block: Callable[[int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_preemptions = 0
        self.waiting: list[Sequence] = []
        self.waiting_imports: list[Sequence] = []
        self.importing: dict[SequenceId, Sequence] = {}
        self.running: dict[SequenceId, Sequence] = {}
        self.tables = BlockTables(pool, config.allocator, config.max_model_len, copy_block)
        self._pool = pool
        self._config = config
        self._flights = SingleFlight(pool.block_size)
        self._clock = clock
        # Running sequences that are not prefill_only: those whose table may still grow.
        self._num_growing = 0

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.waiting_imports) + self._flights.num_followers

    # ------------------------------------------------------------ arrivals and departures

    def add(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        insort(self._line(sequence), sequence, key=lambda waiting: waiting.queue_key)

    def finish_import(self, sequence: Sequence) -> None:
        """The copy is good: the sequence goes on as if it had been computed here."""
        assert sequence.holding is not None and sequence.import_holding is not None
        del self.importing[sequence.seq_id]
        self._pool.absorb(sequence.holding, sequence.import_holding, at=sequence.num_indexed)
        sequence.import_holding = None
        self._run(sequence)

    def index(self, sequence: Sequence) -> None:
        """Lets others share what is now computed and accepted of the sequence: whoever waited for
        that comes back into line."""
        if not self.tables.index(sequence):
            return
        for follower in self._flights.advance(sequence):
            self.add(follower)

    def remove(self, sequence: Sequence) -> None:
        """The sequence leaves its line or the running; its blocks are the caller's to release."""
        if sequence.status is Status.RUNNING:
            del self.running[sequence.seq_id]
            self._num_growing -= not sequence.spec.prefill_only
            for follower in self._flights.land(sequence):
                self.add(follower)
        elif sequence.status is Status.IMPORTING:
            del self.importing[sequence.seq_id]
        elif sequence.status is Status.WAITING:
            self._line(sequence).remove(sequence)
        elif sequence.status is Status.FOLLOWING:
            self._flights.unfollow(sequence)
        sequence.status = Status.ENDED

    # ------------------------------------------------------------ one step

    def schedule(self) -> Plan | None:
        """The next step. None: launched steps must be collected first, then ask again."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        growing: list[Sequence] = []
        is_full = self.tables.is_full
        for sequence in self.running.values():
            num_pending = sequence.num_pending()
            if num_pending > 1:
                prefills.append(sequence)
            elif num_pending == 1:
                if sequence.has_penalties and sequence.num_tokens > len(sequence.token_ids):
                    return None
                decodes.append(sequence)
                if is_full(sequence):
                    growing.append(sequence)
        if len(growing) > self._pool.num_available:
            if any(sequence.num_rows_in_flight for sequence in self.running.values()):
                return None
            self._preempt(growing, decodes, prefills)
        for sequence in growing:
            self.tables.grow(sequence)
        plan = Plan()
        for sequence in decodes:
            _plan_row(plan, sequence, 1)
        self._plan_prefills(plan, prefills)
        return plan

    def _plan_prefills(self, plan: Plan, prefills: list[Sequence]) -> None:
        """Admits who can start, and gives the prompts under way their parts of the step."""
        config = self._config
        budget = PrefillBudget(
            config.step_budget - len(plan.rows),
            config.max_num_partial_prefills,
            config.enable_chunked_prefill,
        )
        prefills.sort(key=lambda prefill: prefill.queue_key)
        for sequence in prefills:
            budget.join(sequence.num_pending())
        prefills += self._admit(plan, budget)
        for sequence, num_tokens in zip(prefills, budget.split(), strict=True):
            if num_tokens > 0:
                _plan_row(plan, sequence, num_tokens)

    # ------------------------------------------------------------ preemption

    def _preempt(self, *lists: list[Sequence]) -> None:
        """Takes victims off the step, out of all ``lists``, until those in the first can grow."""
        growing = lists[0]
        while len(growing) > self._pool.num_available:
            victim = max(self.running.values(), key=self._expendability)
            for sequences in lists:
                if victim in sequences:
                    sequences.remove(victim)
            self._put_back(victim)

    def _expendability(self, sequence: Sequence) -> tuple[bool, int, int]:
        """The youngest of the least important goes first, but not again and again."""
        may_be_preempted = sequence.num_preemptions < self._config.max_preemptions
        return (may_be_preempted, sequence.spec.priority, sequence.order)

    def _put_back(self, victim: Sequence) -> None:
        self.num_preemptions += 1
        self.remove(victim)
        self.tables.give_back(victim)
        victim.num_preemptions += 1
        victim.since_s = self._clock()
        self.add(victim)

    # ------------------------------------------------------------ admission

    def _admit(self, plan: Plan, budget: PrefillBudget) -> list[Sequence]:
        """Admits whoever has waited longest while budget, slots and room last; returns those that
        have something to compute."""
        admitted: list[Sequence] = []
        while self._num_slots() > 0:
            sequence = self._head(budget)
            if sequence is None:
                break
            hits = self.tables.hits(sequence)
            if not sequence.is_import and self._flights.follow(sequence, len(hits)):
                self.waiting.pop(0)
                sequence.status = Status.FOLLOWING
                continue
            if not self.tables.take(sequence, hits, self._watermark()):
                break
            self._line(sequence).pop(0)
            now_s = self._clock()
            sequence.queue_s += now_s - sequence.since_s
            sequence.since_s = now_s
            if sequence.is_import:
                sequence.status = Status.IMPORTING
                self.importing[sequence.seq_id] = sequence
                plan.imports.append(sequence)
            else:
                self._run(sequence)
                self._flights.lead(sequence)
                budget.join(sequence.num_pending())
                admitted.append(sequence)
        return admitted

    def _head(self, budget: PrefillBudget) -> Sequence | None:
        """The first of both lines; one that only lacks budget in this step lets imports pass."""
        heads = self.waiting_imports[:1]
        if self.waiting and budget.admits(self.waiting[0].num_tokens):
            heads = heads + self.waiting[:1]
        return min(heads, key=lambda head: head.queue_key, default=None)

    def _line(self, sequence: Sequence) -> list[Sequence]:
        return self.waiting_imports if sequence.is_import else self.waiting

    def _num_slots(self) -> int:
        return self._config.max_running - len(self.running) - len(self.importing)

    def _watermark(self) -> int:
        """Blocks that an admission has to leave; contiguous tables never grow into them."""
        if self._config.allocator is AllocatorKind.CONTIGUOUS:
            return 0
        busy = self._num_growing or self.importing
        return max(1, self._num_growing) if busy else 0

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        self.running[sequence.seq_id] = sequence
        self._num_growing += not sequence.spec.prefill_only


def _plan_row(plan: Plan, sequence: Sequence, num_tokens: int) -> None:
    start = sequence.num_computed
    end = start + num_tokens
    samples = end == sequence.num_tokens and sequence.spec.params.max_tokens > 0
    sequence.num_computed = end
    sequence.num_rows_in_flight += 1
    if samples:
        sequence.num_tokens += 1
    is_prefill = num_tokens > 1 or start < sequence.num_prompt
    plan.rows.append(PlannedRow(sequence, start, end, samples, is_prefill))
