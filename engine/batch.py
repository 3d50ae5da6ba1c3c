"""What one step asks of a model and what it answers: a batch is a list of records.

The engine builds a `Batch` from the scheduler's plan; a `ModelRunner` (engine/runner.py) computes
it and gives one `RowResult` a row, in order.

A row in mid-prompt, a decode and a verified draft are the same thing: some new tokens of one
sequence, the first at position ``start``, whose KV goes through the block table::

    position     0 .. start-1        start .. start+n-1           start+n
                 [KV in the pool]    [token_ids: compute these]   [sampled, if ``sample`` is set]
    slot of position p = block_ids[p // block_size] * block_size + p % block_size
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.types import SamplingParams, SequenceId, TokenId, TokenLogprobs

# Stands in a row for the id that this sequence's previous, not yet collected step sampled.
IN_FLIGHT: TokenId = -1


@dataclass(slots=True)
class SampleRequest:
    """How to sample one token, whose absolute index in its sequence is ``position``.

    ``token_ids`` is the sequence's own list (prompt, then output; not a copy): a runner that needs
    it reads it during launch. It holds the ids 0 .. position-1 whenever ``params`` has a penalty:
    a sequence with penalties is never scheduled while it has a token in flight. Otherwise the last
    one may be missing.
    """

    params: SamplingParams
    num_prompt_tokens: int
    position: int
    token_ids: Sequence[TokenId]

    @property
    def num_output_tokens(self) -> int:
        """Output tokens before this one (min_tokens counts them)."""
        return self.position - self.num_prompt_tokens


@dataclass(slots=True)
class PromptLogprobsRequest:
    """Asks for the log-probabilities of prompt tokens: ``target_ids[j]`` is the token at position
    ``start + j + 1``, scored by the logits of position ``start + j``. ``num_top`` as in
    ``SamplingParams.prompt_logprobs``. Never more targets than the row has tokens."""

    num_top: int
    target_ids: Sequence[TokenId]


@dataclass(slots=True)
class BatchRow:
    """New tokens of one sequence.

    ``block_ids`` is the sequence's live block table, long enough for all positions of this row;
    it may change after launch returns, so a runner reads it during launch. Token ids that are
    ``IN_FLIGHT`` (at most the first) are known to the runner alone.
    ``sample`` None: no logits needed, a chunk in mid-prompt. The last ``num_draft_tokens`` d of
    ``token_ids`` are drafts: the last d + 1 positions are sampled, the first of them at
    ``sample.position``, which is then ``start + len(token_ids) - d``.
    """

    seq_id: SequenceId
    token_ids: Sequence[TokenId]
    start: int
    block_ids: Sequence[int]
    sample: SampleRequest | None = None
    num_draft_tokens: int = 0
    prompt_logprobs: PromptLogprobsRequest | None = None


def sample_requests(row: BatchRow, token_ids: Sequence[TokenId]) -> list[SampleRequest]:
    """One a sampled position of a row that samples; ``token_ids`` are the row's, with none in
    flight. Behind a draft, the draft is part of the history."""
    request, num_drafts = row.sample, row.num_draft_tokens
    assert request is not None
    if num_drafts == 0:
        return [request]
    history = request.token_ids
    if request.params.has_penalties:
        drafts = token_ids[len(token_ids) - num_drafts :]
        history = [*history[: request.position], *drafts]
    return [
        SampleRequest(request.params, request.num_prompt_tokens, request.position + d, history)
        for d in range(num_drafts + 1)
    ]


@dataclass(slots=True)
class Batch:
    """Rows of one step, each of another sequence."""

    step_id: int
    rows: list[BatchRow]


@dataclass(slots=True)
class RowResult:
    """What a row gave. ``token_ids``: the sampled ids, one a sampled position, () without
    ``sample``; fewer, but one, where a position behind a draft has no good logits (a draft may be
    anything). Every id lies in 0 .. vocab_size-1. ``logprobs`` has one entry a token where
    ``params.logprobs`` is set, ``prompt_logprobs`` one a target.
    ``error``: only this row failed (it raised, or its logits were not finite); log text."""

    token_ids: tuple[TokenId, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
