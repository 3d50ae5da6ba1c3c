"""Which tokens the next step computes: running decodes first, then prefills.

Life of a sequence in here::

    1. add                it waits, in one line for those to compute and one for imports: resumes
                          before new work, then by priority and age
    2. admission          of the older head: all blocks of its tokens plus one, at once or not at
                          all; a cached prefix is shared instead of computed; an import needs none
                          of the step's budget, but waits for its copy before it runs
    3. running            each step computes what is pending, within the budget; decodes need a new
                          block now and then
    4. preemption         no block left for a decode: the youngest gives all its blocks back, keeps
                          its tokens and waits again
    5. leave              it ended; its blocks go back once no launched step writes to them

Nobody is overtaken for want of blocks or of a slot, so nobody starves. An admission leaves one
block for each running sequence to grow into, unless the pool is otherwise idle: so at least one
sequence always runs, and preempted ones do not bounce.
"""

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from common.types import SequenceId
from engine.block_pool import BlockPool, RefKind
from engine.plan import Plan, PlannedRow
from engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine. ``async_depth`` is the number of steps that may be launched ahead of
    the one being collected."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 256
    max_model_len: int = 8192
    enable_chunked_prefill: bool = True
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


@dataclass(slots=True)
class SchedulerCounters:
    """Since the start. A query is one admission of new work, a hit one that found anything;
    recomputation after preemption is neither."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0


class Scheduler:
    """``copy_block`` copies one block inside the pool (copy-on-write)."""

    def __init__(
        self,
        pool: BlockPool,
        config: SchedulerConfig,
        copy_block: Callable[[int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = SchedulerCounters()
        self.waiting: list[Sequence] = []
        self.waiting_imports: list[Sequence] = []
        self.importing: dict[SequenceId, Sequence] = {}
        self.running: dict[SequenceId, Sequence] = {}
        self._pool = pool
        self._config = config
        self._copy_block = copy_block
        self._clock = clock
        # Running sequences that are not prefill_only: those whose table may still grow.
        self._num_growing = 0

    # ------------------------------------------------------------ arrivals and departures

    def fits(self, sequence: Sequence) -> bool:
        """Whether the whole pool could hold the sequence at its longest."""
        return self._blocks_for(sequence.compute_limit) <= self._pool.num_total

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

    def remove(self, sequence: Sequence) -> None:
        """The sequence leaves its line or the running; its blocks are the caller's to release."""
        if sequence.status is Status.RUNNING:
            del self.running[sequence.seq_id]
            self._num_growing -= not sequence.spec.prefill_only
        elif sequence.status is Status.IMPORTING:
            del self.importing[sequence.seq_id]
        elif sequence.status is Status.WAITING:
            self._line(sequence).remove(sequence)
        sequence.status = Status.ENDED

    # ------------------------------------------------------------ one step

    def schedule(self) -> Plan | None:
        """The next step. None: launched steps must be collected first, then ask again."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        num_new_blocks = 0
        block_size = self._pool.block_size
        for sequence in self.running.values():
            num_pending = sequence.num_pending()
            if num_pending > 1:
                prefills.append(sequence)
            elif num_pending == 1:
                if sequence.has_penalties and sequence.num_tokens > len(sequence.token_ids):
                    return None
                decodes.append(sequence)
                num_new_blocks += self._is_full(sequence, block_size)
        if num_new_blocks > self._pool.num_available:
            if any(sequence.num_rows_in_flight for sequence in self.running.values()):
                return None
            self._preempt(decodes, prefills, num_new_blocks)
        plan = Plan()
        budget = self._config.step_budget
        for sequence in decodes:
            if self._is_full(sequence, block_size):
                self._grow(sequence)
            self._plan_row(plan, sequence, 1)
        budget -= len(decodes)
        for sequence in prefills:
            budget -= self._plan_prefill(plan, sequence, budget)
        self._admit(plan, budget)
        return plan

    def _plan_prefill(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        """Plans as much of a prompt as the step still takes; returns how much."""
        num_tokens = min(sequence.num_pending(), budget)
        if num_tokens > 0:
            self._plan_row(plan, sequence, num_tokens)
        return num_tokens

    def _plan_row(self, plan: Plan, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed
        end = start + num_tokens
        samples = end == sequence.num_tokens and sequence.spec.params.max_tokens > 0
        sequence.num_computed = end
        sequence.num_rows_in_flight += 1
        if samples:
            sequence.num_tokens += 1
        plan.rows.append(PlannedRow(sequence, start, end, samples))

    # ------------------------------------------------------------ room

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)

    def _blocks_wanted(self, sequence: Sequence) -> int:
        """Blocks of all its tokens plus one, but never more than it will use in all its life."""
        now = self._blocks_for(sequence.num_tokens) + 1
        return min(now, self._blocks_for(sequence.compute_limit))

    def _has_room(self, num_blocks: int) -> bool:
        busy = self._num_growing or self.importing
        watermark = max(1, self._num_growing) if busy else 0
        return num_blocks + watermark <= self._pool.num_available

    def _num_slots(self) -> int:
        return self._config.max_running - len(self.running) - len(self.importing)

    @staticmethod
    def _is_full(sequence: Sequence, block_size: int) -> bool:
        assert sequence.holding is not None
        return sequence.num_computed >= len(sequence.holding.block_ids) * block_size

    def _grow(self, sequence: Sequence) -> None:
        assert sequence.holding is not None
        blocks = self._pool.allocate(sequence.holding, 1)
        assert blocks is not None

    def _preempt(
        self, decodes: list[Sequence], prefills: list[Sequence], num_new_blocks: int
    ) -> None:
        """Takes the youngest off the step until the other decodes can grow."""
        block_size = self._pool.block_size
        while num_new_blocks > self._pool.num_available:
            victim = max(self.running.values(), key=lambda running: running.queue_key[1:])
            if victim in decodes:
                decodes.remove(victim)
                num_new_blocks -= self._is_full(victim, block_size)
            elif victim in prefills:
                prefills.remove(victim)
            self._put_back(victim)

    def _put_back(self, victim: Sequence) -> None:
        assert victim.holding is not None
        self.counters.preemptions += 1
        self.remove(victim)
        self._pool.release(victim.holding)
        victim.forget_kv()
        victim.num_preemptions += 1
        victim.since_s = self._clock()
        self.add(victim)

    # ------------------------------------------------------------ admission

    def _admit(self, plan: Plan, budget: int) -> None:
        """Admits whoever has waited longest while budget, slots and room last."""
        while self._num_slots() > 0:
            sequence = self._head(budget)
            if sequence is None or not self._take_blocks(sequence):
                return
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
                budget -= self._plan_prefill(plan, sequence, budget)

    def _head(self, budget: int) -> Sequence | None:
        """The first of both lines; one that only lacks budget in this step lets imports pass."""
        heads = self.waiting_imports[:1]
        if self.waiting:
            needs = 1 if self._config.enable_chunked_prefill else self.waiting[0].num_tokens
            if budget >= needs:
                heads = heads + self.waiting[:1]
        return min(heads, key=lambda head: head.queue_key, default=None)

    def _line(self, sequence: Sequence) -> list[Sequence]:
        return self.waiting_imports if sequence.is_import else self.waiting

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence its whole block table, or nothing."""
        if sequence.is_import:
            return self._take_import_blocks(sequence)
        return self._take_prefill_blocks(sequence)

    def _take_prefill_blocks(self, sequence: Sequence) -> bool:
        usable = 0 if sequence.wants_prompt_logprobs else sequence.num_tokens
        hits = self._pool.match(sequence.chain, sequence.token_ids, usable // self._pool.block_size)
        # The logits of the last token are needed, so a hit must leave it to compute. Where that
        # ends the hit inside a block, the block is copied and the last token written in the copy.
        source = hits.pop() if len(hits) * self._pool.block_size == sequence.num_tokens else None
        num_fresh = self._blocks_wanted(sequence) - len(hits)
        num_revived = self._pool.num_unreferenced(hits)
        if source is not None and not self._has_room(
            num_fresh + num_revived + self._pool.num_unreferenced([source])
        ):
            source = None
        if not self._has_room(num_fresh + num_revived):
            return False
        num_hit_tokens = len(hits) * self._pool.block_size
        sequence.num_indexed = len(hits)
        sequence.block_parent = self._pool.parent_after(hits)
        sequence.holding = self._pool.hold(RefKind.SEQUENCE, sequence.seq_id)
        self._pool.share(sequence.holding, hits)
        if source is None:
            self._pool.allocate(sequence.holding, num_fresh)
        else:
            num_hit_tokens = sequence.num_tokens - 1
            self._allocate_with_copy(sequence, num_fresh, source)
        self._count_hit(sequence, num_hit_tokens)
        sequence.start_from(num_hit_tokens)
        return True

    def _allocate_with_copy(self, sequence: Sequence, num_fresh: int, source: int) -> None:
        assert sequence.holding is not None
        pin = self._pool.hold(RefKind.SEQUENCE, sequence.seq_id)
        self._pool.share(pin, [source])
        blocks = self._pool.allocate(sequence.holding, num_fresh)
        assert blocks is not None
        self._copy_block(source, blocks[0])
        self._pool.release(pin)

    def _take_import_blocks(self, sequence: Sequence) -> bool:
        """Room for a handed-off sequence: cached blocks are shared, the others of its KV are held
        as importing until the copy into them has settled. All its tokens but the last have KV."""
        num_kv_tokens = sequence.num_tokens - 1
        hits = self._pool.match(
            sequence.chain, sequence.token_ids, num_kv_tokens // self._pool.block_size
        )
        num_covered = self._blocks_for(num_kv_tokens)
        num_wanted = self._blocks_wanted(sequence)
        if not self._has_room(num_wanted - len(hits) + self._pool.num_unreferenced(hits)):
            return False
        sequence.num_indexed = len(hits)
        sequence.block_parent = self._pool.parent_after(hits)
        sequence.holding = self._pool.hold(RefKind.SEQUENCE, sequence.seq_id)
        sequence.import_holding = self._pool.hold(RefKind.IMPORT, sequence.seq_id)
        self._pool.share(sequence.holding, hits)
        self._pool.allocate(sequence.import_holding, num_covered - len(hits))
        self._pool.allocate(sequence.holding, num_wanted - num_covered)
        self._count_hit(sequence, len(hits) * self._pool.block_size)
        sequence.start_from(num_kv_tokens)
        sequence.num_transferred = sequence.num_prompt - sequence.num_cached
        return True

    def _count_hit(self, sequence: Sequence, num_hit_tokens: int) -> None:
        hit_prompt = min(num_hit_tokens, sequence.num_prompt)
        sequence.num_cached += max(0, hit_prompt - sequence.was_settled)
        if sequence.chain is not None and sequence.num_preemptions == 0:
            self.counters.prefix_queries += 1
            self.counters.prefix_hits += num_hit_tokens > 0
            self.counters.prefix_query_tokens += sequence.num_tokens
            self.counters.prefix_hit_tokens += num_hit_tokens

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        self.running[sequence.seq_id] = sequence
        self._num_growing += not sequence.spec.prefill_only
