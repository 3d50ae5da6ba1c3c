"""Drafts from a second, smaller model with a cache of its own (``draft=DIR``).

Its KV chases the sequence's tokens as the target's does, by one number: ``num_computed``. ::

    token_ids   | prompt | output ......... x |            x: the target computes it in this step
    draft's KV  |------------------>                       behind: read in chunks, from what the
                                                           step's budget leaves
                |------------------------>  d1 d2 ... dk   near: what is missing goes with round 1

A few tokens behind is normal: a step without drafts adds one, and the last draft of a proposal that
was accepted as a whole was never computed. Of drafts that it has computed, those that the target
accepted are good, the others are written over: the cache follows acceptance, and needs no word
about it. Hand-off, prefix hits and resumes only make the gap wider.

The blocks are of a pool of its own, which conserves on its own (invariant I4). Where it is full,
sequences that have had no drafts for long lose theirs, and else there are no drafts.
"""

from collections.abc import Sequence as Items

from common.types import SequenceId, TokenId
from engine.batch import Batch, BatchRow
from engine.block_pool import BlockPool, Holding, RefKind
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.speculation.proposer import Ask
from engine.speculation.rounds import Proposal, run_rounds

# With more than that missing it reads on first, without proposing.
_NEAR = 16
# Steps without an ask after which a sequence's blocks may go to another.
_IDLE_STEPS = 64


class _Kept:
    """What the draft model has of one sequence. ``drafts`` were computed behind ``num_computed``
    tokens and are not known to be right."""

    __slots__ = ("drafts", "failed", "holding", "last_step", "num_computed")

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self.num_computed = 0
        self.drafts: Items[TokenId] = ()
        self.failed = False
        self.last_step = 0

    def confirm(self, token_ids: Items[TokenId]) -> None:
        """Drafts that became the sequence's own count as computed; its last token never does."""
        for draft in self.drafts:
            position = self.num_computed
            if position >= len(token_ids) - 1 or token_ids[position] != draft:
                break
            self.num_computed += 1
        self.drafts = ()


class DraftProposer:
    """``runner`` computes the draft model over ``pool``; its context is ``max_model_len``."""

    name = "draft"
    is_free = False

    def __init__(self, runner: ModelRunner, pool: BlockPool, max_model_len: int) -> None:
        self._runner = runner
        self._pool = pool
        self._max_len = min(max_model_len, pool.num_total * pool.block_size)
        self._kept: dict[SequenceId, _Kept] = {}
        self._num_steps = 0

    def reach(self, sequence: Sequence, limit: int) -> int:
        kept = self._kept.get(sequence.seq_id)
        if kept is not None and kept.failed:
            return 0
        return max(0, min(limit, self._max_len - len(sequence.token_ids)))

    def prepare(self, asks: Items[Ask], num_tokens: int) -> list[Ask]:
        self._num_steps += 1
        ready: list[Ask] = []
        chunks: list[tuple[_Kept, BatchRow]] = []
        for ask in asks:
            sequence, token_ids = ask.sequence, ask.sequence.token_ids
            kept = self._of(sequence)
            kept.confirm(token_ids)
            num_missing = len(token_ids) - kept.num_computed
            if num_missing <= _NEAR:
                if self._has_room(kept, len(token_ids) + ask.num_drafts):
                    ready.append(ask)
                continue
            num_new = min(num_missing - 1, num_tokens)
            end = kept.num_computed + num_new
            if num_new > 0 and self._has_room(kept, end):
                num_tokens -= num_new
                new = token_ids[kept.num_computed : end]
                row = BatchRow(sequence.seq_id, new, kept.num_computed, kept.holding.block_ids)
                chunks.append((kept, row))
        if chunks:
            self._compute(chunks)
        return ready

    def propose(self, asks: Items[Ask]) -> list[Items[TokenId]]:
        proposals = []
        for ask in asks:
            kept = self._kept[ask.sequence.seq_id]
            block_ids = kept.holding.block_ids
            proposals.append(Proposal(ask.sequence, ask.num_drafts, kept.num_computed, block_ids))
        run_rounds(self._runner, proposals)
        for proposal in proposals:
            kept = self._kept[proposal.sequence.seq_id]
            kept.failed = proposal.failed
            if proposal.drafts:
                kept.num_computed = len(proposal.sequence.token_ids)
                kept.drafts = proposal.drafts[:-1]
        return [proposal.drafts for proposal in proposals]

    def forget(self, seq_id: SequenceId) -> None:
        kept = self._kept.pop(seq_id, None)
        if kept is not None:
            self._pool.release(kept.holding)

    def _of(self, sequence: Sequence) -> _Kept:
        kept = self._kept.get(sequence.seq_id)
        if kept is None:
            kept = _Kept(self._pool.hold(RefKind.SEQUENCE, sequence.seq_id))
            self._kept[sequence.seq_id] = kept
        kept.last_step = self._num_steps
        return kept

    def _compute(self, chunks: Items[tuple[_Kept, BatchRow]]) -> None:
        results = self._runner.launch(Batch(0, [row for _, row in chunks])).collect()
        for (kept, row), result in zip(chunks, results, strict=True):
            kept.failed = result.error is not None
            kept.num_computed = row.start + len(row.token_ids)

    def _has_room(self, kept: _Kept, num_tokens: int) -> bool:
        missing = -(-num_tokens // self._pool.block_size) - len(kept.holding.block_ids)
        if missing <= 0:
            return True
        if missing > self._pool.num_available:
            self._drop_idle()
        return self._pool.allocate(kept.holding, missing) is not None

    def _drop_idle(self) -> None:
        latest = self._num_steps - _IDLE_STEPS
        for seq_id in [one for one, kept in self._kept.items() if kept.last_step < latest]:
            self.forget(seq_id)
