"""A body as the message that a gRPC client would have sent, so that one parser judges both."""

from typing import Any

from common.errors import InvalidRequest, Unsupported
from common.wire import inference
from gateway.http.schemas import (
    ChatBody,
    CompletionBody,
    Generation,
    Message,
    TokenizeBody,
)
from gateway.http.unsupported import refuse_in_message, refuse_unsupported
from gateway.sampling import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

_DEFAULT_MAX_TOKENS = 16  # of completions, at OpenAI
_SEED_MASK = (1 << 64) - 1
_SAME = (
    "frequency_penalty", "ignore_eos", "include_stop_str_in_output", "max_tokens", "min_p",
    "min_tokens", "presence_penalty", "prompt_logprobs", "repetition_penalty",
    "skip_special_tokens", "stop_token_ids", "temperature", "top_k", "top_p",
)  # fmt: skip


def completion_requests(body: CompletionBody, client_id: str) -> list[inference.GenerateRequest]:
    """One a prompt. Raises InvalidRequest and Unsupported."""
    sampling = _sampling(body)
    if body.max_tokens is None:
        sampling.max_tokens = _DEFAULT_MAX_TOKENS
    if body.logprobs is not None:
        sampling.logprobs = body.logprobs
    # Echoed prompts have logprobs where the answer has, and an echo of no new tokens needs a pass.
    if body.echo and not sampling.HasField("prompt_logprobs"):
        if body.logprobs is not None:
            sampling.prompt_logprobs = body.logprobs
        elif sampling.max_tokens == 0:
            sampling.prompt_logprobs = 0
    prompts: list[dict[str, Any]]
    if isinstance(body.prompt, str):
        prompts = [{"text": body.prompt}]
    elif not body.prompt:
        raise InvalidRequest("prompt", "is empty; send at least one token")
    elif isinstance(body.prompt[0], int):
        prompts = [{"token_ids": inference.TokenIds(ids=body.prompt)}]
    else:
        prompts = [
            {"text": one} if isinstance(one, str) else {"token_ids": inference.TokenIds(ids=one)}
            for one in body.prompt
        ]
    return [_request(body, client_id, sampling, prompt) for prompt in prompts]


def chat_request(body: ChatBody, client_id: str) -> inference.GenerateRequest:
    """Raises InvalidRequest and Unsupported."""
    sampling = _sampling(body)
    if body.max_completion_tokens is not None:
        sampling.max_tokens = body.max_completion_tokens
    if body.logprobs:
        sampling.logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    return _request(body, client_id, sampling, {"chat": _chat(body.messages, body)})


def tokenize_request(body: TokenizeBody) -> inference.GenerateRequest:
    """Raises InvalidRequest."""
    request = inference.GenerateRequest()
    if body.add_special_tokens is not None:
        request.add_special_tokens = body.add_special_tokens
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt", "send prompt or messages, one of them")
    if body.prompt is not None:
        request.text = body.prompt
    if body.messages is not None:
        request.chat.CopyFrom(_chat(body.messages, body))
    return request


def _request(
    body: Generation,
    client_id: str,
    sampling: inference.SamplingParams,
    prompt: dict[str, Any],
) -> inference.GenerateRequest:
    request = inference.GenerateRequest(
        request_id=client_id,
        sampling=sampling,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        n=num_choices(body),
        **prompt,
    )
    if body.speculation == "off":
        request.speculation = inference.SPECULATION_OFF
    if body.add_special_tokens is not None:
        request.add_special_tokens = body.add_special_tokens
    return request


def num_choices(body: Generation) -> int:
    return 1 if body.n is None else body.n


def _sampling(body: Generation) -> inference.SamplingParams:
    extra = body.model_extra or {}
    refuse_unsupported(extra, num_choices(body))
    extra.clear()  # a body lives as long as its answer, and may have megabytes of these
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "is for streams only; set stream: true")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    # Too many are not even converted.
    for field, given, limit in (
        ("stop", stop, MAX_STOP_STRINGS),
        ("stop_token_ids", body.stop_token_ids or [], MAX_STOP_TOKEN_IDS),
        ("logit_bias", body.logit_bias or {}, MAX_LOGIT_BIAS),
    ):
        if len(given) > limit:
            raise InvalidRequest(field, f"at most {limit} entries")
    given_fields = {name: getattr(body, name) for name in _SAME}
    sampling = inference.SamplingParams(
        stop=stop,
        logit_bias=_logit_bias(body.logit_bias or {}),
        **{name: value for name, value in given_fields.items() if value is not None},
    )
    if body.seed is not None:
        sampling.seed = body.seed & _SEED_MASK
    return sampling


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise InvalidRequest("logit_bias", "keys must be token ids")
        bias[int(key)] = value
    return bias


def _chat(messages: list[Message], body: ChatBody | TokenizeBody) -> inference.ChatInput:
    chat = inference.ChatInput(
        messages=[
            inference.ChatMessage(role=message.role, content=_content(index, message))
            for index, message in enumerate(messages)
        ],
        continue_final_message=bool(body.continue_final_message),
    )
    if body.add_generation_prompt is not None:
        chat.add_generation_prompt = body.add_generation_prompt
    elif body.continue_final_message:
        chat.add_generation_prompt = False
    return chat


def _content(index: int, message: Message) -> str:
    """Text parts one to a line, as vLLM joins them."""
    extra = message.model_extra or {}
    refuse_in_message(index, extra)
    extra.clear()
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    texts = []
    for part in message.content:
        if part.type != "text":
            raise Unsupported(f"messages[{index}].content", "only parts of type text are supported")
        texts.append(part.text or "")
    return "\n".join(texts)
