"""What the scheduler decided for one step, and how a model is asked to compute it."""

from dataclasses import dataclass, field

from engine.batch import IN_FLIGHT, Batch, BatchRow, PromptLogprobsRequest, SampleRequest
from engine.sequence import Sequence


@dataclass(slots=True)
class PlannedRow:
    """Compute the tokens at ``start .. end-1`` of a sequence; sample the next where told.
    ``is_prefill``: prompt tokens, or several at once of what a preempted or moved sequence had
    before."""

    sequence: Sequence
    start: int
    end: int
    samples: bool
    is_prefill: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class Plan:
    """One step, and the imports for which room was made."""

    rows: list[PlannedRow] = field(default_factory=list)
    imports: list[Sequence] = field(default_factory=list)

    def batch(self, step_id: int) -> Batch:
        return Batch(step_id, [_batch_row(planned) for planned in self.rows])


def _batch_row(planned: PlannedRow) -> BatchRow:
    sequence, start, end = planned.sequence, planned.start, planned.end
    assert sequence.holding is not None
    token_ids = sequence.token_ids[start:end]
    if len(token_ids) < end - start:
        token_ids.append(IN_FLIGHT)
    row = BatchRow(sequence.seq_id, token_ids, start, sequence.holding.block_ids)
    if planned.samples:
        params = sequence.spec.params
        row.sample = SampleRequest(params, sequence.num_prompt, end, sequence.token_ids)
    if sequence.wants_prompt_logprobs:
        num_top = sequence.spec.params.prompt_logprobs
        assert num_top is not None
        targets = sequence.token_ids[start + 1 : min(end + 1, sequence.num_prompt)]
        row.prompt_logprobs = PromptLogprobsRequest(num_top, targets)
    return row
