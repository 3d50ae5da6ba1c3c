"""A model proposes: one token a round for all sequences together, each fed with its last.

The draft model samples as the target does, with the same parameters, history and noise (invariant
I3): where both would choose the same token, both do. So its draft is accepted with a probability of
at least (1 - TV) / (1 + TV), TV being the total variation between the two models' distributions
(Daliri, Musco, Suresh 2024, arXiv 2408.07978, theorem 1).
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from common.types import TokenId
from engine.batch import Batch, BatchRow, SampleRequest
from engine.runner import ModelRunner
from engine.sequence import Sequence


@dataclass(slots=True)
class Proposal:
    """Drafts under way. The draft model has the KV of ``start`` tokens of the sequence in
    ``block_ids``, which have room for all but the last draft."""

    sequence: Sequence
    num_drafts: int
    start: int
    block_ids: Items[int]
    drafts: list[TokenId] = field(default_factory=list)
    failed: bool = False

    @property
    def is_open(self) -> bool:
        return not self.failed and len(self.drafts) < self.num_drafts

    def row(self) -> BatchRow:
        """What it has not computed: what is new of the sequence, then one draft a round."""
        sequence = self.sequence
        params = sequence.spec.params
        if params.logprobs is not None:
            params = replace(params, logprobs=None)
        if self.drafts:
            start, new = len(sequence.token_ids) + len(self.drafts) - 1, [self.drafts[-1]]
        else:
            start, new = self.start, sequence.token_ids[self.start :]
        history: Items[TokenId] = sequence.token_ids
        if params.has_penalties:
            history = [*history, *self.drafts]
        sample = SampleRequest(params, sequence.num_prompt, start + len(new), history)
        return BatchRow(sequence.seq_id, new, start, self.block_ids, sample)


def run_rounds(runner: ModelRunner, proposals: Items[Proposal]) -> None:
    """Fills all of them; one whose row fails keeps what it has."""
    while is_open := [proposal for proposal in proposals if proposal.is_open]:
        batch = Batch(0, [proposal.row() for proposal in is_open])
        for proposal, result in zip(is_open, runner.launch(batch).collect(), strict=True):
            if result.token_ids:
                proposal.drafts.append(result.token_ids[0])
            else:
                proposal.failed = True
