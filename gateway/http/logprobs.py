"""Log-probabilities as completions, chat and vLLM's prompt_logprobs show them."""

from collections.abc import Callable, Iterable
from typing import Any

from common.types import TokenId, TokenLogprobs

Json = dict[str, Any]
TokenText = Callable[[TokenId], str]
# JSON has no infinity; the value is vLLM's.
_LOWEST = -9999.0


def completion_logprobs(
    positions: Iterable[TokenLogprobs], text_of: TokenText, offset: int
) -> Json:
    """Lists by position. ``offset``: where the first token's text begins in the answer's. The
    chosen token is among the top ones, as at OpenAI."""
    logprobs: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for position in positions:
        token = text_of(position.token_id)
        logprobs["text_offset"].append(offset)
        logprobs["tokens"].append(token)
        offset += len(token)
        if position.logprob is None:  # the first token of a prompt
            logprobs["token_logprobs"].append(None)
            logprobs["top_logprobs"].append(None)
            continue
        chosen = _finite(position.logprob)
        logprobs["token_logprobs"].append(chosen)
        top = {text_of(token_id): _finite(value) for token_id, value in position.top}
        logprobs["top_logprobs"].append({**top, token: chosen})
    return logprobs


def chat_logprobs(positions: Iterable[TokenLogprobs], text_of: TokenText) -> Json:
    return {
        "content": [
            {
                **_entry(text_of(position.token_id), position.logprob),
                "top_logprobs": [
                    _entry(text_of(token_id), value) for token_id, value in position.top
                ],
            }
            for position in positions
        ]
    }


def prompt_logprobs(positions: Iterable[TokenLogprobs], text_of: TokenText) -> list[Json | None]:
    """By position: token id to what is known of it; null for the first token."""
    return [_by_token_id(position, text_of) for position in positions]


def _by_token_id(position: TokenLogprobs, text_of: TokenText) -> Json | None:
    if position.logprob is None:
        return None
    ranked = [(token_id, value, rank) for rank, (token_id, value) in enumerate(position.top, 1)]
    ranked.append((position.token_id, position.logprob, position.rank))
    return {
        str(token_id): {
            "logprob": _finite(value),
            "rank": rank,
            "decoded_token": text_of(token_id),
        }
        for token_id, value, rank in ranked
    }


def _entry(token: str, logprob: float | None) -> Json:
    value = _LOWEST if logprob is None else _finite(logprob)
    return {"token": token, "logprob": value, "bytes": list(token.encode())}


def _finite(value: float) -> float:
    return max(value, _LOWEST)
