"""Requests to the OpenAI-compatible port with nothing between: bodies, statuses and SSE frames."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

TIMEOUT_S = 300.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# What the official package would parse each kind of object to.
TYPES: dict[str, Any] = {
    "text_completion": Completion,
    "chat.completion": ChatCompletion,
    "chat.completion.chunk": ChatCompletionChunk,
}


@dataclass
class Answer:
    """One choice, streamed or not."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


@asynccontextmanager
async def http_client(address: str, **options: Any) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(
        base_url=f"http://{address}", timeout=TIMEOUT_S, trust_env=False, **options
    ) as client:
        yield client


async def post(
    client: httpx2.AsyncClient, path: str, body: Mapping[str, Any], **options: Any
) -> dict[str, Any]:
    """The whole answer, which must be a good one."""
    response = await client.post(path, json=dict(body), **options)
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    validate(content)
    return content


async def stream(
    client: httpx2.AsyncClient, path: str, body: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """All chunks, each of which fits its type; the stream ends with [DONE] and nothing else."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        data = await response.aread()
    chunks = frames(data)
    for chunk in chunks:
        validate(chunk)
    return chunks


def frames(data: bytes) -> list[dict[str, Any]]:
    """What a client that splits at empty lines, and knows nothing of carriage returns, finds."""
    assert b"\r" not in data
    *parts, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(part.startswith("data: ") for part in parts), parts
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def validate(content: Mapping[str, Any]) -> None:
    """OpenAI's own chunks of completions have a null finish_reason until the last; its types,
    which were made for whole answers, do not know that."""
    if content["object"] == "text_completion":
        choices = [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in content["choices"]]
        content = {**content, "choices": choices}
    TYPES[content["object"]].model_validate(content, strict=True)


def answers(contents: list[dict[str, Any]], n: int = 1) -> list[Answer]:
    """Of all chunks of a stream, or of one whole answer."""
    found = [Answer() for _ in range(n)]
    for content in contents:
        for choice in content["choices"]:
            answer = found[choice["index"]]
            assert answer.finish_reason is None, "something came after the end"
            message = choice.get("delta") or choice.get("message") or {}
            answer.text += choice.get("text", "") + (message.get("content") or "")
            answer.token_ids += choice.get("token_ids") or []
            answer.finish_reason = choice["finish_reason"]
        if content.get("usage") is not None:
            for answer in found:
                answer.usage = content["usage"]
    return found
