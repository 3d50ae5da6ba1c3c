"""Adds drafts to the decodes of a step, and learns from what became of them.

The life of a draft:

1. *Chosen*: of the step's decodes all of whose tokens are known, each gets a number of drafts:
   what pays (engine/speculation/lengths.py), or always as many as there are (``--fixed-k``).
2. *Proposed*: blocks for them are taken from those that nobody needs now, and the proposer fills
   them. A proposal with too many ids, or an id out of the vocabulary, is dropped and counted.
3. *Verified*: they are computed as further tokens of the sequence's row, in the step of everybody
   else, and each position is sampled as if there were no draft (invariant I3).
4. *Accepted* while equal to the target's own choice; that choice is emitted at the first difference
   (engine/sequence.py, `verify`), so the output is the one without drafts, whatever they were.
5. *Returned*: the blocks in which nothing is left go back to the pool.

Drafts come last: after decodes, prompts and admissions they take what is left of the step's budget
and of the blocks, preempt nobody, and are cut where there is not enough.
"""

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items

from common.types import SequenceId, StepRecord, TokenId
from engine.block_tables import BlockTables
from engine.plan import Plan, PlannedRow
from engine.sequence import Sequence
from engine.speculation.lengths import Acceptance, Candidate, DraftLengths
from engine.speculation.proposer import Ask, Proposer
from engine.speculation.statistics import Reason, SpeculationStatistics

# Before anything is known of a worker's texts.
_FIRST_ACCEPTANCE = 0.5
# A proposer that is not free is tried again after so many decodes without a draft, and later and
# later as long as it fails.
_FIRST_PROBE, _LAST_PROBE = 32, 1024


class _Learned:
    """What one sequence has shown so far."""

    __slots__ = ("acceptance", "expected", "length", "probe_after", "skipped")

    def __init__(self, prior: float) -> None:
        self.acceptance = Acceptance(prior)
        self.length = 0
        # (output position, id) of a draft that was not verified: right or wrong is known later.
        self.expected: tuple[int, TokenId] | None = None
        self.skipped = 0
        self.probe_after = _FIRST_PROBE


class Speculator:
    """``lengths`` None: always ``max_drafts``, as far as the proposer has them."""

    def __init__(
        self,
        proposer: Proposer,
        max_drafts: int,
        vocab_size: int,
        lengths: DraftLengths | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert max_drafts >= 1
        self._proposer = proposer
        self._max_drafts = max_drafts
        self._vocab_size = vocab_size
        self._lengths = lengths
        self._clock = clock
        self._learned: dict[SequenceId, _Learned] = {}
        self._acceptance = Acceptance(_FIRST_ACCEPTANCE)
        self._round_s = 0.0
        self._num_drafts = self._num_emitted = self._num_invalid = 0
        self._num_draft_tokens = self._num_accepted = 0
        self._by_position = [0] * max_drafts
        self._by_length = [0] * (max_drafts + 1)
        self._reasons: Counter[Reason] = Counter()
        self._proposal_s = 0.0

    # ------------------------------------------------------------ before a step

    def draft(self, plan: Plan, step_budget: int, tables: BlockTables) -> None:
        """Gives decodes of ``plan``, which is not launched yet, drafts to verify."""
        start_s = self._clock()
        rows = [row for row in plan.rows if _may_speculate(row)]
        if not rows:
            return
        num_left = step_budget - plan.num_tokens
        reaches = [self._reach(row) for row in rows]
        lengths = self._choose(plan, rows, reaches, num_left)
        wanted: dict[SequenceId, PlannedRow] = {}
        asks: list[Ask] = []
        for row, reach, length in zip(rows, reaches, lengths, strict=True):
            if length == 0:
                self._reasons[Reason.NO_GAIN if reach else Reason.NO_PROPOSAL] += 1
            # What is free is also asked where it is not to be verified.
            if length or (reach and self._proposer.is_free):
                wanted[row.sequence.seq_id] = row
                asks.append(Ask(row.sequence, length))
        if asks:
            ready = self._proposer.prepare(asks, num_left)
            self._reasons[Reason.CATCHING_UP] += len(asks) - len(ready)
            self._propose([(wanted[ask.sequence.seq_id], ask) for ask in ready], tables)
        self._proposal_s += self._clock() - start_s

    def _reach(self, row: PlannedRow) -> int:
        """How many drafts could be of use: behind the last of them the sequence still samples."""
        sequence = row.sequence
        limit = min(self._max_drafts, sequence.token_limit - row.end - 1)
        if limit <= 0:
            return 0
        reach = self._proposer.reach(sequence, limit)
        learned = self._of(sequence)
        if learned.expected is not None:
            position, token_id = learned.expected
            learned.expected = None
            was_right = sequence.token_ids[position] == token_id
            learned.acceptance.add(1, was_right)
            self._acceptance.add(1, was_right)
        return reach

    def _of(self, sequence: Sequence) -> _Learned:
        learned = self._learned.get(sequence.seq_id)
        if learned is None:
            learned = self._learned[sequence.seq_id] = _Learned(self._acceptance.rate)
        return learned

    def _choose(
        self, plan: Plan, rows: Items[PlannedRow], reaches: Items[int], num_left: int
    ) -> list[int]:
        if self._lengths is None:
            return self._as_many_as_fit(rows, reaches, num_left)
        learned = [self._of(row.sequence) for row in rows]
        candidates = [
            Candidate(one.acceptance.rate, reach, one.length)
            for one, reach in zip(learned, reaches, strict=True)
        ]
        num_tokens, num_sampled = plan.num_tokens, sum(row.samples for row in plan.rows)
        lengths = self._lengths.choose(num_tokens, num_sampled, candidates, num_left, self._round_s)
        for index, (one, reach) in enumerate(zip(learned, reaches, strict=True)):
            if reach == 0:
                continue
            one.length = lengths[index]
            if lengths[index] == 0 and not self._proposer.is_free and num_left > 0:
                lengths[index] = self._probe(one, num_tokens, num_sampled)
                num_left -= lengths[index]
        return lengths

    def _as_many_as_fit(
        self, rows: Items[PlannedRow], reaches: Items[int], num_left: int
    ) -> list[int]:
        lengths = []
        for row, reach in zip(rows, reaches, strict=True):
            length = min(reach, max(0, num_left))
            num_left -= length
            lengths.append(length)
            self._of(row.sequence).length = length
        return lengths

    def _probe(self, learned: _Learned, num_tokens: int, num_sampled: int) -> int:
        """1 where it is time to see whether drafts have become better, and that would pay."""
        assert self._lengths is not None
        learned.skipped += 1
        if learned.skipped < learned.probe_after:
            return 0
        learned.skipped = 0
        learned.probe_after = min(_LAST_PROBE, 2 * learned.probe_after)
        perfect = [Candidate(rate=1.0, reach=1)]
        return self._lengths.choose(num_tokens, num_sampled, perfect, 1, self._round_s)[0]

    def _propose(self, wanted: Items[tuple[PlannedRow, Ask]], tables: BlockTables) -> None:
        """Has the proposer fill the asks, and gives the rows what it has to offer."""
        lengths: list[int] = []
        for row, ask in wanted:
            length, row.num_draft_blocks = tables.extend_for_drafts(ask.sequence, ask.num_drafts)
            self._reasons[Reason.NO_ROOM] += length == 0 < ask.num_drafts
            lengths.append(length)
            ask.num_drafts = max(length, self._proposer.is_free)
        start_s = self._clock()
        proposals = self._proposer.propose([ask for _, ask in wanted])
        self._proposing_took(max(lengths, default=0), self._clock() - start_s)
        for (row, ask), proposal, length in zip(wanted, proposals, lengths, strict=True):
            proposed = self._checked(ask, proposal)
            drafts = proposed[:length]
            learned = self._of(ask.sequence)
            if drafts:
                row.draft(drafts)
                self._by_length[len(drafts)] += 1
                self._reasons[Reason.GAIN if learned.length else Reason.PROBE] += 1
            else:
                tables.drop_drafts(ask.sequence, row.num_draft_blocks)
                row.num_draft_blocks = 0
                if proposed:
                    learned.expected = (len(ask.sequence.token_ids), proposed[0])

    def _proposing_took(self, num_rounds: int, seconds: float) -> None:
        if num_rounds and not self._proposer.is_free:
            round_s = seconds / num_rounds
            self._round_s += 0.2 * (round_s - self._round_s) if self._round_s else round_s

    def _checked(self, ask: Ask, proposal: Items[TokenId]) -> tuple[TokenId, ...]:
        """The proposal, or nothing if it is none."""
        if not proposal:
            return ()
        are_ids = min(proposal) >= 0 and max(proposal) < self._vocab_size
        if not are_ids or len(proposal) > ask.num_drafts:
            self._num_invalid += 1
            self._reasons[Reason.INVALID] += 1
            return ()
        return tuple(proposal)

    # ------------------------------------------------------------ after it

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """So many of a row's drafts were accepted and emitted."""
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        self._num_accepted += num_accepted
        self._num_emitted += num_accepted + 1
        for place in range(num_accepted):
            self._by_position[place] += 1
        learned = self._of(sequence)
        learned.acceptance.add(num_drafts, num_accepted)
        self._acceptance.add(num_drafts, num_accepted)
        if num_accepted:
            learned.probe_after = _FIRST_PROBE

    def step_took(self, record: StepRecord) -> None:
        if self._lengths is not None and record.num_prefill_tokens == 0:
            num_tokens = record.num_decode_tokens + record.num_draft_tokens
            self._lengths.observe(num_tokens, record.end_s - record.start_s)

    def forget(self, seq_id: SequenceId) -> None:
        """The sequence is over."""
        self._learned.pop(seq_id, None)
        self._proposer.forget(seq_id)

    def statistics(self) -> SpeculationStatistics:
        return SpeculationStatistics(
            proposer=self._proposer.name,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted,
            num_emitted_tokens=self._num_emitted,
            num_invalid=self._num_invalid,
            accepted_by_position=tuple(self._by_position),
            lengths=tuple(self._by_length),
            reasons=dict(self._reasons),
            acceptance=self._acceptance.rate,
            proposal_s=self._proposal_s,
        )


def _may_speculate(row: PlannedRow) -> bool:
    """A decode all of whose tokens are known: the one that it computes is not in flight."""
    sequence = row.sequence
    return (
        not row.is_prefill
        and row.samples
        and len(sequence.token_ids) == row.end
        and sequence.spec.speculate
        and not sequence.spec.prefill_only
    )
