"""Chooses tokens: a pure function of (logits, parameters, tokens so far, seed, position).

The token is the arg max over the allowed ids of logit / T + g(seed, position, id), g a Gumbel
variate (invariant I3 of docs/design.md); greedy is the arg max of the logits. Equal scores go to
the lowest id. One row, in order, where each step is skipped by rows that do not ask for it:

1. Rows with a logit that is not finite fail, alone.
2. Logit bias, min_tokens mask and penalties change a copy of the row (engine/penalties.py). A row
   that they leave without a finite largest value fails too: nothing could be drawn from it.
3. Scores are (logit - largest logit) / T. What lies more than 19.5 below the largest cannot win.
4. min-p, top-k and top-p leave fewer candidates, each working on what the one before left.
5. The arg max of score + noise over the candidates (engine/gumbel_max.py).
6. Log-probabilities are made from the raw logits (engine/logprobs.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from common.types import SamplingParams, TokenId, TokenLogprobs
from engine.batch import RowResult, SampleRequest
from engine.gumbel_max import Draw, gumbel_max
from engine.logprobs import token_logprobs
from engine.penalties import adjusted, changes_logits
from engine.philox import Float32s
from engine.topk import kth_largest, nucleus

# A little more than the widest gap that noise can close (MAX_GUMBEL - MIN_GUMBEL).
WINDOW = 19.5
NOT_FINITE = "logits are not finite"


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token of one row, 0 <= token_id < vocab; or ``error``, and then no token."""

    token_id: TokenId = -1
    logprobs: TokenLogprobs | None = None
    error: str | None = None


def fill(result: RowResult, sampled: Sequence[Sampled]) -> None:
    """Puts the tokens of a row's sampled positions into its result, up to the first that failed;
    a row whose first failed has an error."""
    good: list[Sampled] = []
    for one in sampled:
        if one.error is not None:
            break
        good.append(one)
    if not good:
        result.error = sampled[0].error
        return
    result.token_ids = tuple([one.token_id for one in good])
    result.logprobs = tuple([one.logprobs for one in good if one.logprobs is not None])


def sample(logits: Tensor, requests: Sequence[SampleRequest]) -> list[Sampled]:
    """One token a row of fp32 ``logits`` ``[rows, vocab]``, row i by ``requests[i]``."""
    rows: Float32s = logits.cpu().numpy()
    # One bad value makes the sum bad; sums of real logits are far from the end of fp32.
    finite = logits.sum(dim=1).isfinite().tolist()
    token_ids: list[int] = rows.argmax(axis=1).tolist()  # numpy: the first of equals
    drawn: list[int] = []
    draws: list[Draw] = []
    for i, request in enumerate(requests):
        if not finite[i]:
            continue
        row = rows[i]
        if changes_logits(request):
            row = adjusted(row, request)
            if not math.isfinite(row.max()):
                finite[i] = False
                continue
            token_ids[i] = int(row.argmax())
        if not request.params.greedy:
            drawn.append(i)
            draws.append(_candidates(row, request))
    for i, token_id in zip(drawn, gumbel_max(draws), strict=True):
        token_ids[i] = token_id
    return [
        _result(rows[i], token_ids[i], request.params) if finite[i] else Sampled(error=NOT_FINITE)
        for i, request in enumerate(requests)
    ]


def _result(row: Float32s, token_id: int, params: SamplingParams) -> Sampled:
    assert 0 <= token_id < len(row)
    if params.logprobs is None:
        return Sampled(token_id)
    return Sampled(token_id, token_logprobs(row, token_id, params.logprobs))


def _candidates(row: Float32s, request: SampleRequest) -> Draw:
    """Scales a row by its temperature and applies min-p, top-k and top-p."""
    params = request.params
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, which never wins
        scores: Float32s = (row - row.max()) / np.float32(params.temperature)
    floor = -math.inf
    if params.min_p > 0:
        floor = math.log(params.min_p)
    if 0 < params.top_k < len(scores):
        floor = max(floor, kth_largest(scores, params.top_k))
    ids = np.flatnonzero(scores >= max(floor, -WINDOW))
    if params.top_p < 1:
        allowed = scores if floor == -math.inf else scores[scores >= floor]
        total = float(np.exp(allowed).sum(dtype=np.float64))
        ids = ids[np.sort(nucleus(scores[ids], params.top_p * total))]
    return Draw(ids, scores[ids], params.seed, request.position)
