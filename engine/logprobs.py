"""Log-probabilities of the raw logits: of a chosen token, its rank, and the most likely ones."""

import math

import numpy as np

from common.types import TokenId, TokenLogprobs
from engine.philox import Float32s
from engine.topk import largest


def token_logprobs(logits: Float32s, token_id: TokenId, num_top: int) -> TokenLogprobs:
    """Of one row ``[vocab]``; ``num_top`` most likely tokens beside the chosen one."""
    peak = float(logits.max())
    normaliser = peak + math.log(float(np.exp(logits - peak).sum(dtype=np.float64)))
    chosen = logits[token_id]
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(chosen) - normaliser,
        rank=int(np.count_nonzero(logits > chosen)) + 1,
        top=tuple((int(i), float(logits[i]) - normaliser) for i in largest(logits, num_top)),
    )
