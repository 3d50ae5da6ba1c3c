"""What the scheduler decided for one step, and how a model is asked to compute it."""

from dataclasses import dataclass, field

from common.types import TokenId
from engine.batch import IN_FLIGHT, Batch, BatchRow, PromptLogprobsRequest, SampleRequest
from engine.sequence import Sequence


@dataclass(slots=True)
class PlannedRow:
    """Compute the tokens at ``start .. end-1`` of a sequence; sample the next where told.
    ``is_prefill``: prompt tokens, or several at once of what a preempted or moved sequence had
    before. ``drafts``: of a decode, guesses at the tokens that follow, the last of those to
    compute; ``num_draft_blocks`` were added to its table for them."""

    sequence: Sequence
    start: int
    end: int
    samples: bool
    is_prefill: bool
    drafts: tuple[TokenId, ...] = ()
    num_draft_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def draft(self, drafts: tuple[TokenId, ...]) -> None:
        """The decode is to verify these as well."""
        self.drafts = drafts
        self.end += len(drafts)
        self.sequence.draft(len(drafts))


@dataclass(slots=True)
class Plan:
    """One step, and the imports for which room was made."""

    rows: list[PlannedRow] = field(default_factory=list)
    imports: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def batch(self, step_id: int) -> Batch:
        return Batch(step_id, [_batch_row(planned) for planned in self.rows])


def _batch_row(planned: PlannedRow) -> BatchRow:
    sequence, start, end = planned.sequence, planned.start, planned.end
    assert sequence.holding is not None
    token_ids = sequence.token_ids[start:end]
    if planned.drafts:
        token_ids += planned.drafts
    elif len(token_ids) < end - start:
        token_ids.append(IN_FLIGHT)
    row = BatchRow(sequence.seq_id, token_ids, start, sequence.holding.block_ids)
    if planned.samples:
        params, num_drafts = sequence.spec.params, len(planned.drafts)
        position = end - num_drafts
        row.sample = SampleRequest(params, sequence.num_prompt, position, sequence.token_ids)
        row.num_draft_tokens = num_drafts
    if sequence.wants_prompt_logprobs:
        num_top = sequence.spec.params.prompt_logprobs
        assert num_top is not None
        targets = sequence.token_ids[start + 1 : min(end + 1, sequence.num_prompt)]
        row.prompt_logprobs = PromptLogprobsRequest(num_top, targets)
    return row
