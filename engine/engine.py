"""The engine: what a worker adds comes out as events, one step at a time.

A step is three calls, ``schedule`` -> plan, ``launch`` -> handle, ``collect`` -> tokens. At depth 1
the next step is launched before the present one is collected::

    depth 0:  schedule 1  launch 1  collect 1 | schedule 2  launch 2  collect 2
    depth 1:  schedule 1  launch 1 | schedule 2  launch 2  collect 1 | schedule 3 ...

so a sequence may turn out to have ended with a token already under way behind it: that token is
dropped, and the sequence's blocks go back when the step that writes to them is collected, never
before. Not thread-safe: everything runs on the engine's thread (engine/loop.py).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from common.types import (
    BlockRef,
    EngineEvent,
    FinishReason,
    SequenceFailed,
    SequenceId,
    SequenceOutput,
    SequenceSpec,
    StepRecord,
    TokenId,
)
from engine.batch import RowResult
from engine.block_events import MAX_SNAPSHOT_KEYS, BlockEvents, snapshot
from engine.block_pool import BlockPool, Holding, RefKind
from engine.ledger import Ledger
from engine.plan import Plan, PlannedRow
from engine.runner import ModelRunner, StepHandle
from engine.scheduler import Scheduler, SchedulerConfig
from engine.self_check import SelfCheck
from engine.sequence import Sequence, Status
from engine.speculation.speculator import Speculator
from engine.statistics import EngineStatistics
from engine.step_record import step_record


@dataclass(slots=True)
class _Launched:
    """A step under way."""

    step_id: int
    start_s: float
    rows: list[PlannedRow]
    handle: StepHandle


class Engine:
    def __init__(
        self,
        runner: ModelRunner,
        pool: BlockPool,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        raises_on_fault: bool = False,
        speculator: Speculator | None = None,
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._config = config
        self._clock = clock
        self._scheduler = Scheduler(pool, config, runner.copy_block, clock)
        self._speculator = speculator
        self._self_check = SelfCheck(pool, self._owners, clock, raises_on_fault)
        self._sequences: dict[SequenceId, Sequence] = {}
        # Aborted while a copy into their blocks was under way.
        self._quarantined: dict[SequenceId, Sequence] = {}
        self._leases: dict[SequenceId, Holding] = {}
        self._launched: _Launched | None = None
        self._events: list[EngineEvent] = []
        # The last step could do nothing, and nothing has changed since.
        self._stuck = False
        self._num_added = 0
        self._num_steps = 0
        self._num_prefill_tokens = 0
        self._num_decode_tokens = 0
        self._num_output_tokens = 0
        self._num_accepted = 0
        self._num_failed = 0

    # ------------------------------------------------------------ what a worker asks

    @property
    def step_tokens(self) -> int:
        """The most that a step computes."""
        return self._config.max_num_batched_tokens

    def add(self, spec: SequenceSpec) -> None:
        """A sequence to compute here, from its first token: new, prefill_only, or resumed."""
        self._add(spec, is_import=False)

    def add_import(self, spec: SequenceSpec) -> None:
        """A sequence whose KV, of all its ids but the last, is to be copied in: a step yields
        ImportReady when there is room; then the worker calls finish_import or drop_import."""
        assert spec.output_ids and not spec.prefill_only
        self._add(spec, is_import=True)

    def finish_import(self, seq_id: SequenceId) -> None:
        """The copy has settled OK. After an abort it is dropped all the same."""
        if seq_id in self._quarantined:
            self.drop_import(seq_id)
            return
        sequence = self._sequences[seq_id]
        self._scheduler.finish_import(sequence)
        sequence.decode_since_s = self._clock()
        self._scheduler.index(sequence)
        self._stuck = False

    def drop_import(self, seq_id: SequenceId) -> None:
        """The copy has returned and is not to be used, or never began: its blocks are freed."""
        if seq_id in self._sequences:
            self.abort(seq_id)
        sequence = self._quarantined.pop(seq_id)
        assert sequence.import_holding is not None
        self._pool.release(sequence.import_holding)
        self._stuck = False

    def abort(self, seq_id: SequenceId) -> None:
        """Ends a sequence in any state, without an event; unknown ids (it just ended) are ignored.
        After its ImportReady the blocks under copy stay importing until finish_import or
        drop_import is called, which the worker owes even then."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            if sequence.status is Status.IMPORTING:
                self._quarantined[seq_id] = sequence
            self._end(sequence)
            self._stuck = False
        # It may have ended as it was added, which no step has told yet.
        self._events = [event for event in self._events if event.seq_id != seq_id]

    def release_lease(self, seq_id: SequenceId) -> None:
        """The lease on the blocks that this prefill_only sequence left has ended."""
        self._pool.release(self._leases.pop(seq_id))
        self._stuck = False

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything. A queue that only waits for blocks held outside (a
        lease, a copy under way) is no work until one of the calls above changes something."""
        if self._events or self._launched is not None:
            return True
        scheduler = self._scheduler
        has_any = scheduler.running or scheduler.waiting or scheduler.waiting_imports
        return bool(has_any) and not self._stuck

    def statistics(self) -> EngineStatistics:
        scheduler, prefixes = self._scheduler, self._scheduler.tables.counters
        prefix = self._pool.prefix
        return EngineStatistics(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_importing=len(scheduler.importing) + len(self._quarantined),
            num_leased=len(self._leases),
            blocks=self._pool.counts(),
            num_steps=self._num_steps,
            num_prefill_tokens=self._num_prefill_tokens,
            num_decode_tokens=self._num_decode_tokens,
            num_output_tokens=self._num_output_tokens,
            num_failed=self._num_failed,
            preemptions=scheduler.num_preemptions,
            prefix_queries=prefixes.queries,
            prefix_hits=prefixes.hits,
            prefix_query_tokens=prefixes.query_tokens,
            prefix_hit_tokens=prefixes.hit_tokens,
            prefix_evictions=0 if prefix is None else prefix.num_evictions,
            ledger_faults=self._self_check.num_faults,
            speculation=None if self._speculator is None else self._speculator.statistics(),
        )

    def ledger(self) -> Ledger:
        return replace(self._pool.ledger(), leaked=self._pool.num_leaked(self._owners()))

    def _owners(self) -> set[SequenceId]:
        """Everyone who may hold blocks."""
        writing = self._launched.rows if self._launched is not None else []
        known = {row.sequence.seq_id for row in writing}
        return known.union(self._sequences, self._quarantined, self._leases)

    # ------------------------------------------------------------ what routing follows

    @property
    def has_block_events(self) -> bool:
        """Whether `take_block_events` would give anything; cheap, and safe from any thread."""
        return self._pool.prefix is not None and bool(self._pool.prefix.events)

    def take_block_events(self) -> BlockEvents:
        """Prefixes stored and removed since the last call; nothing without a prefix cache."""
        prefix = self._pool.prefix
        return BlockEvents() if prefix is None else prefix.events.take()

    def cached_keys(self) -> tuple[int, ...]:
        """64-bit prefixes of all indexed keys, at most MAX_SNAPSHOT_KEYS. Taken between two calls
        of `take_block_events`, it counts for everything before it: a follower that takes events
        and then this, or this and then events, may see a key twice but misses none."""
        return snapshot(self._pool.indexed_keys(MAX_SNAPSHOT_KEYS))

    # ------------------------------------------------------------ one step

    def step(self) -> tuple[list[EngineEvent], StepRecord | None]:
        """One step; the record is of the step collected, None when none was."""
        record = None
        plan = self._scheduler.schedule()
        if plan is None:
            record = self._collect()
            plan = self._scheduler.schedule()
            assert plan is not None
        if self._speculator is not None:
            self._speculator.draft(plan, self._config.step_budget, self._scheduler.tables)
        self._events += [self._scheduler.tables.import_ready(sequence) for sequence in plan.imports]
        launched = self._launch(plan) if plan.rows else None
        if self._launched is not None:
            record = self._collect()
        self._launched = launched
        if launched is not None and self._config.async_depth == 0:
            record = self._collect()
        events, self._events = self._events, []
        self._stuck = not events and not plan.rows and record is None
        self._self_check.after_step(self.has_work)
        return events, record

    def _launch(self, plan: Plan) -> _Launched:
        self._num_steps += 1
        start_s = self._clock()
        handle = self._runner.launch(plan.batch(self._num_steps))
        return _Launched(self._num_steps, start_s, plan.rows, handle)

    def _collect(self) -> StepRecord:
        assert self._launched is not None
        step, self._launched = self._launched, None
        results = step.handle.collect()
        now_s = self._clock()
        num_before = self._num_accepted
        for planned, result in zip(step.rows, results, strict=True):
            self._take(planned, result, now_s)
        num_accepted = self._num_accepted - num_before
        record = step_record(step.step_id, step.start_s, now_s, step.rows, results, num_accepted)
        self._num_prefill_tokens += record.num_prefill_tokens
        self._num_decode_tokens += record.num_decode_tokens
        if self._speculator is not None:
            self._speculator.step_took(record)
        return record

    # ------------------------------------------------------------ one row's result

    def _take(self, planned: PlannedRow, result: RowResult, now_s: float) -> None:
        sequence = planned.sequence
        sequence.num_rows_in_flight -= 1
        if sequence.status is Status.ENDED:
            self._release(sequence)
            return
        if result.error is not None:
            self._fail(sequence, "failed", result.error)
            return
        index, token_ids, reason = sequence.num_output, result.token_ids, None
        num_good = planned.num_tokens
        if planned.drafts:
            token_ids, reason = sequence.verify(planned.drafts, token_ids)
            num_good = len(token_ids)
            self._drop_drafts(planned, num_good - 1)
        elif planned.samples:
            reason = sequence.accept(token_ids[0])
        sequence.settle(planned.start + num_good)
        if sequence.wants_prompt_logprobs:
            sequence.add_prompt_logprobs(planned.start, result.prompt_logprobs)
        if sequence.num_settled // self._pool.block_size > sequence.num_indexed:
            self._scheduler.index(sequence)
        if planned.samples:
            self._tell(planned, result, index, token_ids, reason, now_s)
        elif not sequence.samples and planned.end == sequence.compute_limit:
            self._finish(sequence, FinishReason.LENGTH, now_s)

    def _drop_drafts(self, planned: PlannedRow, num_accepted: int) -> None:
        assert self._speculator is not None
        self._num_accepted += num_accepted
        self._scheduler.tables.drop_drafts(planned.sequence, planned.num_draft_blocks)
        self._speculator.verified(planned.sequence, len(planned.drafts), num_accepted)

    def _tell(
        self,
        planned: PlannedRow,
        result: RowResult,
        index: int,
        token_ids: tuple[TokenId, ...],
        reason: FinishReason | None,
        now_s: float,
    ) -> None:
        """The sequence has these tokens from this step, the first with output index ``index``."""
        sequence = planned.sequence
        spec = sequence.spec
        self._num_output_tokens += len(token_ids)
        held: tuple[BlockRef, ...] = ()
        if reason is None and spec.prefill_only:
            held = self._lease(sequence)
        if reason is not None or index == len(spec.output_ids) or planned.drafts:
            sequence.update_counts(now_s)
        self._events.append(
            SequenceOutput(
                sequence.seq_id,
                index,
                token_ids,
                sequence.counts,
                len(planned.drafts),
                result.logprobs[: len(token_ids)],
                sequence.take_prompt_logprobs() if sequence.wants_prompt_logprobs else (),
                reason,
                token_ids[-1] if reason is FinishReason.STOP else None,
                held,
            )
        )
        if reason is not None:
            self._end(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason, now_s: float) -> None:
        """Ends a sequence without a token."""
        self._events.append(
            SequenceOutput(
                seq_id=sequence.seq_id,
                index=sequence.num_output,
                token_ids=(),
                counts=sequence.update_counts(now_s),
                prompt_logprobs=sequence.take_prompt_logprobs(),
                finish_reason=reason,
            )
        )
        self._end(sequence)

    def _fail(self, sequence: Sequence, reason: str, detail: str) -> None:
        """Only this sequence fails. None of the blocks that it read may be hit again: the fault
        may lie in any of them."""
        self._num_failed += 1
        if sequence.holding is not None:
            self._pool.forget(sequence.holding.block_ids)
        self._events.append(SequenceFailed(sequence.seq_id, reason, detail))
        self._end(sequence)

    def _lease(self, sequence: Sequence) -> tuple[BlockRef, ...]:
        """Turns the sequence's references into a lease's; the sequence itself is over."""
        holding, sequence.holding = sequence.holding, None
        assert holding is not None
        self._pool.convert(holding, RefKind.LEASE)
        self._leases[sequence.seq_id] = holding
        self._end(sequence)
        return self._pool.refs_to(holding.block_ids)

    # ------------------------------------------------------------ arrivals, imports, ends

    def _add(self, spec: SequenceSpec, is_import: bool) -> None:
        assert spec.seq_id not in self._sequences and spec.prompt_ids
        self._num_added += 1
        now_s = self._clock()
        chain = self._pool.chain(spec.tenant, spec.cache_salt)
        max_len = self._config.max_model_len
        sequence = Sequence(spec, chain, self._num_added, max_len, now_s, is_import)
        self._sequences[spec.seq_id] = sequence
        self._stuck = False
        if spec.output_ids and sequence.num_tokens >= sequence.token_limit:
            self._finish(sequence, FinishReason.LENGTH, now_s)
        elif sequence.num_tokens + sequence.samples > max_len:
            self._fail(sequence, "too_large", f"{spec.num_tokens} tokens, at most {max_len}")
        elif not 0 <= min(sequence.token_ids) <= max(sequence.token_ids) < self._runner.vocab_size:
            self._fail(sequence, "failed", "a token id is out of the vocabulary")
        elif not self._scheduler.tables.fits(sequence):
            total = self._pool.num_total
            detail = f"{sequence.compute_limit} tokens never fit {total} blocks"
            self._fail(sequence, "too_large", detail)
        else:
            self._scheduler.add(sequence)

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.seq_id]
        if self._speculator is not None:
            self._speculator.forget(sequence.seq_id)
        self._scheduler.remove(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Gives the blocks of an ended sequence back, once no launched step writes to them."""
        if sequence.num_rows_in_flight == 0 and sequence.holding is not None:
            self._pool.release(sequence.holding)
            sequence.holding = None
