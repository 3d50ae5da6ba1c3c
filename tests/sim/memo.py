"""The oracle's pure functions, remembered over all schedules of a process.

Schedules share their prompts and parameters, so that nearly every token has been drawn before. What
is looked up by is what the functions are given: a wrong block gives another digest, which gives
another token, exactly as if nothing were remembered.
"""

from collections.abc import Sequence
from functools import lru_cache

from common.types import SamplingParams, TokenId
from engine import oracle
from engine.batch import SampleRequest
from engine.penalties import changes_logits
from engine.sampler import Sampled

_MAX_REMEMBERED = 1 << 17

_token_kv = oracle.token_kv
_choose = oracle._choose
_chosen: dict[tuple[int, SamplingParams, int, int], Sampled] = {}


@lru_cache(maxsize=_MAX_REMEMBERED)
def _remembered_kv(token_ids: tuple[TokenId, ...], start: int) -> oracle.Words:
    kv = _token_kv(token_ids, start)
    kv.flags.writeable = False
    return kv


def token_kv(token_ids: Sequence[TokenId], start: int) -> oracle.Words:
    return _remembered_kv(tuple(token_ids), start)


def choose(
    seeds: Sequence[int], requests: Sequence[SampleRequest], vocab_size: int
) -> list[Sampled]:
    if any(changes_logits(request) for request in requests):  # depends on the tokens so far too
        return _choose(seeds, requests, vocab_size)
    keys = [
        (seed, request.params, request.position, vocab_size)
        for seed, request in zip(seeds, requests, strict=True)
    ]
    new = [i for i, key in enumerate(keys) if key not in _chosen]
    if new:
        if len(_chosen) > _MAX_REMEMBERED:
            _chosen.clear()
            new = list(range(len(keys)))
        made = _choose([seeds[i] for i in new], [requests[i] for i in new], vocab_size)
        _chosen.update(zip([keys[i] for i in new], made, strict=True))
    return [_chosen[key] for key in keys]


def remember() -> None:
    """From now on, in this process."""
    oracle.token_kv = token_kv
    oracle._choose = choose
