"""Any OpenAI-compatible endpoint, streaming, as a target.

Prompts go to ``/v1/completions`` as token ids, or to ``/v1/chat/completions`` as one user message
of as many short words. One event is one arrival; the true number of tokens comes with the last
event's usage. The answer's ids are asked for (``return_token_ids``, a field of vLLM and Baton that
others ignore) only where a session goes on.
"""

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Self

import httpx2

from cli.bench.target import Piece
from common.errors import BatonError, ConfigError, InvalidRequest, Overloaded, Unavailable
from common.types import TokenId, Usage

# Connecting may take this long; an answer as long as it likes.
_TIMEOUT = httpx2.Timeout(10.0, read=None)
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
_REFUSED = (429, 503)
# One token each in most vocabularies.
_WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with",
    "his", "they", "at", "be", "this", "have", "from", "or", "one", "had", "by", "word", "but",
    "not", "what", "all", "were", "we", "when", "your", "can", "said", "there", "use", "an",
)  # fmt: skip


class HttpTarget:
    """``url`` is the server's base, with or without ``/v1``."""

    def __init__(self, client: httpx2.AsyncClient, base: str, model: str, is_chat: bool) -> None:
        self._client = client
        self._url = f"{base}/chat/completions" if is_chat else f"{base}/completions"
        self._model = model
        self._is_chat = is_chat

    @classmethod
    async def connect(cls, url: str, model: str | None, is_chat: bool, api_key: str) -> Self:
        """Asks for the model's name where none is given. Raises ConfigError where no such server
        answers."""
        base = url.rstrip("/").removesuffix("/v1") + "/v1"
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        client = httpx2.AsyncClient(
            headers=headers, timeout=_TIMEOUT, limits=_LIMITS, trust_env=False
        )
        try:
            return cls(client, base, model or await _first_model(client, base), is_chat)
        except BaseException:
            await client.aclose()
            raise

    async def send(
        self, prompt_ids: Sequence[TokenId], max_tokens: int, wants_ids: bool
    ) -> AsyncGenerator[Piece, None]:
        body = self._body(prompt_ids, max_tokens, wants_ids)
        try:
            async with self._client.sse(self._url, method="POST", json=body) as source:
                if source.response.status_code != 200:
                    await source.response.aread()
                    raise _error(source.response.status_code, source.response.text)
                async for event in source:
                    if event.data == "[DONE]":
                        return
                    yield self._piece(event.data)
        except httpx2.HTTPError as error:
            raise Unavailable(f"the connection failed: {type(error).__name__}") from None

    async def close(self) -> None:
        await self._client.aclose()

    def _body(
        self, prompt_ids: Sequence[TokenId], max_tokens: int, wants_ids: bool
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._is_chat:
            text = " ".join(_WORDS[id_ % len(_WORDS)] for id_ in prompt_ids)
            body |= {"messages": [{"role": "user", "content": text}]}
            body |= {"max_completion_tokens": max_tokens}
        else:
            body |= {"prompt": list(prompt_ids), "max_tokens": max_tokens}
            if wants_ids:
                body["return_token_ids"] = True
        return body

    def _piece(self, data: str) -> Piece:
        try:
            event = json.loads(data)
        except ValueError:
            raise Unavailable("an event is not JSON") from None
        if error := event.get("error"):
            raise _error(int(error.get("code") or 500), data)
        usage = _usage(event.get("usage"))
        if not event.get("choices"):
            return Piece(usage=usage)
        choice = event["choices"][0]
        text = choice["delta"].get("content") if self._is_chat else choice.get("text")
        token_ids = tuple(choice.get("token_ids") or ())
        return Piece(len(token_ids) or int(bool(text)), token_ids, usage)


async def _first_model(client: httpx2.AsyncClient, base: str) -> str:
    try:
        response = await client.get(f"{base}/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError, TypeError):
        raise ConfigError("url", f"{base}/models names no model; give --model") from None


def _usage(content: dict[str, Any] | None) -> Usage | None:
    if not content:
        return None
    prompt_tokens = int(content["prompt_tokens"])
    cached = int((content.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    return Usage(
        prompt_tokens=prompt_tokens,
        output_tokens=int(content["completion_tokens"]),
        prefill_cached=cached,
        prefill_computed=prompt_tokens - cached,
    )


def _error(status: int, text: str) -> BatonError:
    """As the load generator counts it: refused, or failed with this reason."""
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = f"HTTP {status}"
    if status in _REFUSED:
        return Overloaded(message)
    return InvalidRequest(f"HTTP {status}", message)
