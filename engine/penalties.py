"""What a request changes in the logits before a token is chosen, in vLLM's order.

Logit bias and the min_tokens mask, then the repetition penalty (over prompt and output; Keskar et
al., "CTRL", arXiv 1909.05858, section 4.1), then frequency and presence penalties (over output
only, as OpenAI's API defines them).
"""

import numpy as np

from common.types import SamplingParams
from engine.batch import SampleRequest
from engine.philox import Float32s


def changes_logits(request: SampleRequest) -> bool:
    params = request.params
    return bool(
        params.logit_bias or request.num_output_tokens < params.min_tokens or has_penalties(params)
    )


def has_penalties(params: SamplingParams) -> bool:
    """What depends on the tokens so far: such a row is never computed with one in flight."""
    return bool(
        params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    )


def adjusted(logits: Float32s, request: SampleRequest) -> Float32s:
    """A changed copy of one row ``[vocab]``. Ids beyond the vocabulary have no effect: the
    gateway refuses requests that name them."""
    params = request.params
    row = logits.copy()
    for token_id, bias in params.logit_bias:
        if 0 <= token_id < len(row):
            row[token_id] += bias
    if request.num_output_tokens < params.min_tokens:
        row[[token_id for token_id in params.stop_token_ids if 0 <= token_id < len(row)]] = -np.inf
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(request.token_ids[: request.position], np.int64))
        scores = row[seen]
        penalty = np.float32(params.repetition_penalty)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # the sampler looks
            row[seen] = np.where(scores > 0, scores / penalty, scores * penalty)
    if params.frequency_penalty or params.presence_penalty:
        output = request.token_ids[request.num_prompt_tokens : request.position]
        ids, counts = np.unique(np.asarray(output, np.int64), return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        row[ids] -= penalties.astype(np.float32)
    return row
