"""The load generator's HTTP side, against a real server that speaks OpenAI's protocol by script."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cli.bench.http_target import HttpTarget
from cli.bench.load import Ending, Outcome, run_closed
from cli.bench.workloads import Session, Turn
from common.errors import ConfigError

CACHED = 2


class OpenAIServer:
    """Keeps the bodies that it got. What the prompt begins with says how it answers."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "small", "object": "model"}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        first = body["prompt"][0] if "prompt" in body else 0
        if first == 1:
            error = {"message": "queue full", "type": "overloaded", "code": 429}
            return JSONResponse({"error": error}, 429)
        if first == 2:
            return Response("what?", 418)
        return StreamingResponse(self._events(body, first), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any], first: int) -> AsyncIterator[str]:
        is_chat = "messages" in body
        if is_chat:
            yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        yield ": keep-alive\n\n"
        for i in range(body.get("max_tokens") or body["max_completion_tokens"]):
            choice: dict[str, Any] = {"index": 0}
            choice |= {"delta": {"content": "x"}} if is_chat else {"text": "x"}
            if body.get("return_token_ids"):
                choice["token_ids"] = [2000 + i]
            yield _event({"choices": [choice]})
            if first == 3:
                yield _event({"error": {"message": "worker lost", "code": 503}})
                break
        usage = {
            "prompt_tokens": len(body.get("prompt", "")) or 9,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": CACHED},
        }
        yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


@asynccontextmanager
async def serving() -> AsyncIterator[OpenAIServer]:
    script = OpenAIServer()
    app = Starlette(
        routes=[
            Route("/v1/models", script.models),
            Route("/v1/completions", script.complete, methods=["POST"]),
            Route("/v1/chat/completions", script.complete, methods=["POST"]),
        ]
    )
    listener = socket.create_server(("127.0.0.1", 0))
    script.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield script
    finally:
        server.should_exit = True
        await task


async def play(
    server: OpenAIServer, *sessions: Session, is_chat: bool = False, url: str = ""
) -> list[Outcome]:
    target = await HttpTarget.connect(url or server.url, None, is_chat, "")
    try:
        outcomes = await run_closed(target, sessions, 1)
    finally:
        await target.close()
    return outcomes


async def test_completions_send_ids_and_go_on_from_those_that_came() -> None:
    async with serving() as server:
        session = Session((Turn((40, 41), 3), Turn((42,), 3)))
        first, second = await play(server, session, url=f"{server.url}/v1/")
    body, later = server.bodies
    assert body["prompt"] == [40, 41] and body["model"] == "small" and body["max_tokens"] == 3
    assert body["ignore_eos"] and body["stream_options"] == {"include_usage": True}
    assert later["prompt"] == [40, 41, 2000, 2001, 2002, 42]
    # A field that some servers do not know is sent only where it is needed.
    assert "return_token_ids" in body and "return_token_ids" not in later
    assert first.ending is second.ending is Ending.OK
    assert [count for _, count in first.arrivals] == [1, 1, 1]
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.output_tokens) == (2, 3)
    assert (first.usage.prefill_cached, first.usage.prefill_computed) == (CACHED, 0)


async def test_a_chat_counts_no_token_in_its_first_event() -> None:
    async with serving() as server:
        (outcome,) = await play(server, Session((Turn((40, 41, 42), 3),)), is_chat=True)
    (body,) = server.bodies
    assert len(body["messages"][0]["content"].split()) == 3
    assert body["max_completion_tokens"] == 3
    assert len(outcome.arrivals) == 3 and outcome.num_output == 3


@pytest.mark.parametrize(
    ("first", "ending", "reason"),
    [(1, Ending.REFUSED, "queue full"), (2, Ending.FAILED, "418"), (3, Ending.REFUSED, "lost")],
)
async def test_errors_become_outcomes(first: int, ending: Ending, reason: str) -> None:
    async with serving() as server:
        (outcome,) = await play(server, Session((Turn((first, 41), 3),)))
    assert outcome.ending is ending and reason in outcome.reason


async def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="names no model"):
        await HttpTarget.connect("http://127.0.0.1:1", None, False, "")
    target = await HttpTarget.connect("http://127.0.0.1:1", "small", False, "")
    (outcome,) = await run_closed(target, [Session((Turn((40,), 2),))], 1)
    await target.close()
    assert outcome.ending is Ending.FAILED and "connection failed" in outcome.reason
