"""A client's sampling parameters, checked field by field and filled in.

Every float is tested with ``isfinite`` first: NaN passes any comparison written with < and >.
Limits are those that users of vLLM know, or wider than any real use.
"""

import math
import secrets
from collections.abc import Collection, Iterable

from common.errors import InvalidRequest
from common.types import SamplingParams, TokenId
from common.wire import inference
from gateway.model_facts import ModelFacts

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
# As vLLM does: a smaller temperature is raised to this; 0 is greedy.
_MIN_TEMPERATURE = 0.01
# Logits are divided by it: one close to 0 would make them infinite.
_MIN_REPETITION_PENALTY = 1 / 64


def sampling_params(
    message: inference.SamplingParams,
    facts: ModelFacts,
    num_prompt_tokens: int | None,
    max_logprobs: int,
) -> SamplingParams:
    """Raises InvalidRequest naming the field and its limit. While the prompt's length is not known
    (None), only what does not depend on it is judged."""
    prompt_logprobs = _logprobs(message, "prompt_logprobs", max_logprobs)
    max_tokens = _max_tokens(message, facts, num_prompt_tokens, prompt_logprobs is not None)
    if message.min_tokens > max_tokens:
        raise InvalidRequest("min_tokens", f"must be at most max_tokens ({max_tokens})")
    stop_ids = _token_ids("stop_token_ids", message.stop_token_ids, facts, MAX_STOP_TOKEN_IDS)
    if not message.ignore_eos:
        stop_ids = tuple(dict.fromkeys((*facts.eos_token_ids, *stop_ids)))
    temperature = _number(message, "temperature", facts, 1.0, 0.0, 100.0)
    if 0.0 < temperature < _MIN_TEMPERATURE:
        temperature = _MIN_TEMPERATURE
    return SamplingParams(
        max_tokens=max_tokens,
        seed=message.seed if message.HasField("seed") else secrets.randbits(64),
        min_tokens=message.min_tokens,
        temperature=abs(temperature),
        top_p=_number(message, "top_p", facts, 1.0, 0.0, 1.0, above=True),
        top_k=_top_k(message, facts),
        min_p=_number(message, "min_p", facts, 0.0, 0.0, 1.0),
        repetition_penalty=_number(
            message, "repetition_penalty", facts, 1.0, _MIN_REPETITION_PENALTY, 10.0
        ),
        frequency_penalty=_number(message, "frequency_penalty", facts, 0.0, -2.0, 2.0),
        presence_penalty=_number(message, "presence_penalty", facts, 0.0, -2.0, 2.0),
        stop_token_ids=stop_ids,
        logprobs=_logprobs(message, "logprobs", max_logprobs),
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(message, facts),
    )


def stop_strings(message: inference.SamplingParams) -> tuple[str, ...]:
    if len(message.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"at most {MAX_STOP_STRINGS} strings")
    for text in message.stop:
        if not 0 < len(text.encode()) <= MAX_STOP_BYTES:
            raise InvalidRequest("stop", f"each string must have 1 to {MAX_STOP_BYTES} bytes")
    return tuple(message.stop)


def check_token_ids(field: str, ids: Iterable[int], facts: ModelFacts) -> tuple[TokenId, ...]:
    token_ids = tuple(ids)
    if token_ids and max(token_ids) >= facts.vocab_size:
        raise InvalidRequest(field, f"ids must be below the vocabulary size {facts.vocab_size}")
    return token_ids


def _present(message: inference.SamplingParams) -> set[str]:
    """Names of the fields that the client set."""
    return {descriptor.name for descriptor, _ in message.ListFields()}


def _token_ids(
    field: str, ids: Collection[int], facts: ModelFacts, limit: int
) -> tuple[TokenId, ...]:
    if len(ids) > limit:
        raise InvalidRequest(field, f"at most {limit} ids")
    return check_token_ids(field, ids, facts)


def _number(
    message: inference.SamplingParams,
    name: str,
    facts: ModelFacts,
    default: float,
    low: float,
    high: float,
    above: bool = False,
) -> float:
    """The field's value; where absent the model's own default. ``above``: low is excluded."""
    if name in _present(message):
        value = float(getattr(message, name))
    else:
        value = float(facts.default_sampling.get(name, default))
    inside = math.isfinite(value) and low <= value <= high and not (above and value == low)
    if not inside:
        bound = f"above {low:g}" if above else f"at least {low:g}"
        raise InvalidRequest(name, f"must be a finite number, {bound} and at most {high:g}")
    return value


def _max_tokens(
    message: inference.SamplingParams,
    facts: ModelFacts,
    num_prompt: int | None,
    scores_prompt: bool,
) -> int:
    given = message.max_tokens if message.HasField("max_tokens") else None
    if given == 0 and not scores_prompt:
        raise InvalidRequest("max_tokens", "must be at least 1 (0 only with prompt_logprobs)")
    if num_prompt is None:
        return facts.max_model_len if given is None else given
    # By default all that every live decode pool can hold; if need be what one of them can.
    pool = facts.smallest_pool_tokens if given is None else facts.largest_pool_tokens
    limit, name = facts.bound(pool)
    room = limit - num_prompt
    if room < (0 if given == 0 else 1):
        raise InvalidRequest(
            "prompt",
            f"has {num_prompt} tokens; with an answer there is no room for them in {name} of "
            f"{limit} tokens",
        )
    if given is None:
        return room
    if given > room:
        raise InvalidRequest(
            "max_tokens",
            f"{given} and {num_prompt} prompt tokens can never fit in {name} of {limit} tokens; "
            f"at most {room}",
        )
    return given


def _top_k(message: inference.SamplingParams, facts: ModelFacts) -> int:
    value = message.top_k
    if not message.HasField("top_k"):
        value = int(facts.default_sampling.get("top_k", 0))
    if value in (-1, 0):
        return 0
    if value < 0:
        raise InvalidRequest("top_k", "must be positive, or 0 or -1 for off")
    return min(value, facts.vocab_size)


def _logprobs(message: inference.SamplingParams, name: str, limit: int) -> int | None:
    if name not in _present(message):
        return None
    value = int(getattr(message, name))
    if value > limit:
        raise InvalidRequest(name, f"must be at most {limit}")
    return value


def _logit_bias(
    message: inference.SamplingParams, facts: ModelFacts
) -> tuple[tuple[TokenId, float], ...]:
    if len(message.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest("logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
    check_token_ids("logit_bias", message.logit_bias, facts)
    for value in message.logit_bias.values():
        if not math.isfinite(value) or not -100 <= value <= 100:
            raise InvalidRequest("logit_bias", "values must be finite, between -100 and 100")
    return tuple(sorted(message.logit_bias.items()))
