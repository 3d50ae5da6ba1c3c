"""What one step did, as traces and metrics are told."""

from collections.abc import Sequence

from common.types import ChunkRecord, StepRecord
from engine.batch import RowResult
from engine.plan import PlannedRow


def step_record(
    step_id: int,
    start_s: float,
    end_s: float,
    rows: Sequence[PlannedRow],
    results: Sequence[RowResult],
    num_accepted_tokens: int,
) -> StepRecord:
    chunks = []
    num_context = num_drafts = num_draft_context = 0
    for planned, result in zip(rows, results, strict=True):
        if planned.is_prefill:
            seq_id = planned.sequence.seq_id
            num_logits = planned.samples + len(result.prompt_logprobs)
            chunks.append(ChunkRecord(seq_id, planned.start, planned.num_tokens, num_logits))
            continue
        end = planned.start + 1
        num_context += end
        if planned.drafts:
            num_drafts += len(planned.drafts)
            num_draft_context += sum(range(end + 1, planned.end + 1))
    return StepRecord(
        step_id=step_id,
        start_s=start_s,
        end_s=end_s,
        num_prefill_tokens=sum(chunk.num_tokens for chunk in chunks),
        num_decode_tokens=len(rows) - len(chunks),
        num_sequences=len(rows),
        chunks=tuple(chunks),
        num_decode_context=num_context,
        num_draft_tokens=num_drafts,
        num_accepted_tokens=num_accepted_tokens,
        num_draft_context=num_draft_context,
    )
