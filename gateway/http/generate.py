"""/v1/completions and /v1/chat/completions. The life of a request:

1. its body is parsed into a schema, then into the messages that a gRPC client would have sent;
2. `Service.serve` judges those and runs them, as it does for gRPC;
3. headers go out once something of the answer is there, so that a refusal has its own status;
4. events become chunks (SSE), or are collected into one body.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from common.errors import InvalidRequest, ModelNotFound
from common.telemetry import carrier_from
from common.wire import inference
from gateway.http.answers import Answer, Json, choices_of
from gateway.http.chat import ChatAnswer
from gateway.http.completions import CompletionAnswer
from gateway.http.edge import TENANT, taken_body
from gateway.http.events import EventStream
from gateway.http.messages import chat_request, completion_requests
from gateway.http.schemas import Body, ChatBody, CompletionBody, Generation
from gateway.parser import MAX_ID_BYTES, RequestParser
from gateway.request import OutputEvent
from gateway.serving import Exchange, Service
from gateway.tokenizer import IdTokenizer

# A queue can be long: after this the headers go out, and an error can only be an event.
_HEADERS_S = 10.0

Event = tuple[int, OutputEvent]
# How the fields of gRPC's messages are called here.
_FIELDS = {"text": "prompt", "chat": "messages"}


@dataclass(frozen=True, slots=True)
class TokenRoutes:
    service: Service
    tokenizer: IdTokenizer

    async def completions(self, http: HttpRequest) -> Response:
        body = CompletionBody.parse(taken_body(http.scope))
        messages = completion_requests(body, client_id(http, body))
        return await self._answer(http, body, messages, CompletionAnswer)

    async def chat(self, http: HttpRequest) -> Response:
        body = ChatBody.parse(taken_body(http.scope))
        message = chat_request(body, client_id(http, body))
        return await self._answer(http, body, [message], ChatAnswer)

    async def _answer(
        self,
        http: HttpRequest,
        body: Generation,
        messages: Sequence[inference.GenerateRequest],
        kind: type[Answer],
    ) -> Response:
        model = check_model(self.service.parser, body)
        async with AsyncExitStack() as stack:
            exchange = await self._exchange(stack, http, body, messages, kind)
            answer = kind(
                answer_id=kind.PREFIX + exchange.shown_id,
                model=model,
                created=int(time.time()),
                body=body,
                tokenizer=self.tokenizer,
                choices=choices_of(exchange.requests),
            )
            headers = {**exchange.headers, "x-request-id": exchange.shown_id}
            first = await _first(exchange.events, stack, _HEADERS_S if body.stream else None)
            if body.stream:
                chunks = _chunks(answer, first, exchange.events)
                return EventStream(chunks, stack.pop_all(), headers)
            answer.take(*await first)
            async for index, event in exchange.events:
                answer.take(index, event)
            return JSONResponse(answer.whole(), headers=headers)

    async def _exchange(
        self,
        stack: AsyncExitStack,
        http: HttpRequest,
        body: Generation,
        messages: Sequence[inference.GenerateRequest],
        kind: type[Answer],
    ) -> Exchange:
        parent = carrier_from(http.headers.items())
        tenant: str = http.scope[TENANT]
        try:
            return await stack.enter_async_context(
                self.service.serve(messages, tenant, parent, kind.OPERATION, bool(body.stream))
            )
        except InvalidRequest as error:
            raise in_words_of_http(error, body) from None


def client_id(http: HttpRequest, body: Generation) -> str:
    """The client's name for the request; it comes back in a header. Raises InvalidRequest."""
    given = body.request_id or http.headers.get("x-request-id", "")
    if len(given) > MAX_ID_BYTES or not (given.isascii() and given.isprintable()):
        raise InvalidRequest("request_id", f"must be at most {MAX_ID_BYTES} printable characters")
    return given


def check_model(parser: RequestParser, body: Body) -> str:
    """The name of what is served. Raises ModelNotFound for any other."""
    name = parser.facts().name
    if body.model and body.model != name:
        raise ModelNotFound("this model is not served; the list of models says what is")
    return name


def in_words_of_http(error: InvalidRequest, body: Body) -> InvalidRequest:
    """The same with the field that this client has sent."""
    field = _FIELDS.get(error.field, error.field)
    if isinstance(body, ChatBody):
        if field == "max_tokens" and body.max_completion_tokens is not None:
            field = "max_completion_tokens"
        if field == "logprobs":
            field = "top_logprobs"
    return InvalidRequest(field, error.message.removeprefix(f"{error.field}: "))


async def _first(
    events: AsyncGenerator[Event, None], stack: AsyncExitStack, timeout_s: float | None
) -> "asyncio.Task[Event]":
    """The task of the first event, done unless that takes longer than ``timeout_s``. Raises what
    came instead of an event."""

    async def get() -> Event:
        return await anext(events)

    task = asyncio.get_running_loop().create_task(get())
    stack.push_async_callback(_ended, task)
    await asyncio.wait((task,), timeout=timeout_s)
    if task.done():
        task.result()
    return task


async def _ended(task: "asyncio.Task[Event]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _chunks(
    answer: Answer, first: "asyncio.Task[Event]", events: AsyncIterator[Event]
) -> AsyncIterator[Json]:
    for chunk in answer.opening():
        yield chunk
    for chunk in answer.chunks(*await first):
        yield chunk
    async for index, event in events:
        for chunk in answer.chunks(index, event):
            yield chunk
    for chunk in answer.closing():
        yield chunk
