"""What stands between the network and the routes, for every HTTP request:

1. without a valid key, where keys are required, nothing of its body is kept;
2. its body is read whole, within its limits of size and time, and all bodies within one of memory;
3. the route runs; when the client leaves meanwhile, it is cancelled;
4. whatever was raised before the first byte of an answer becomes an error in OpenAI's shape.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import BatonError, InternalError, Overloaded
from common.status import is_for_clients
from gateway.api_keys import ApiKeys
from gateway.http.errors import HttpError, error_response

log = logging.getLogger(__name__)

TENANT, BODY = "baton.tenant", "baton.body"
# Set once nothing of the body is left to be read.
_WHOLE = "baton.whole"
# Asked by balancers and benchmarks, which have no key.
OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version"})
# Bodies being read at the same time, all together; at least a few of the largest. What is small
# does not count, so that slow large bodies keep no small one out: connections bound those.
_MAX_BUFFERED_BYTES = 32 << 20
_SMALL_BYTES = 1 << 16
# How long a refused body is still read, so that its sender gets to the answer.
_DISCARD_S = 2.0


class Edge:
    """An ASGI application around the routes."""

    def __init__(
        self, routes: ASGIApp, keys: ApiKeys, max_body_bytes: int, read_timeout_s: float
    ) -> None:
        self._routes = routes
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._max_buffered_bytes = max(_MAX_BUFFERED_BYTES, 4 * max_body_bytes)
        self._buffered_bytes = 0
        self._read_timeout_s = read_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._serve(scope, receive, watched_send)
        except _Gone:
            return
        except Exception as error:
            refusal = _as_ours(error)
            if started:
                raise
            await _refuse(refusal, scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {key.decode("latin-1"): value for key, value in scope["headers"]}
        scope["app"] = self  # routes raise instead of answering 404 and 405 by themselves
        scope[TENANT] = ""
        if scope["path"] not in OPEN_PATHS:
            scope[TENANT] = self._keys.tenant(headers.get("authorization", b"").decode("latin-1"))
        scope[BODY] = await self._body(headers, receive)
        scope[_WHOLE] = True
        await _unless_gone(self._routes(scope, receive, send), receive)

    async def _body(self, headers: dict[str, bytes], receive: Receive) -> bytes:
        """The whole of it. Raises HttpError, Overloaded and _Gone."""
        declared = headers.get("content-length", b"")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            raise self._too_large()
        body = bytearray()
        size = counted = 0
        try:
            async with asyncio.timeout(self._read_timeout_s):
                async for part in _parts(receive):
                    size += len(part)
                    body += part
                    if size > _SMALL_BYTES:
                        self._buffered_bytes += size - counted
                        counted = size
                    if size > self._max_body_bytes:
                        raise self._too_large()
                    if counted and self._buffered_bytes > self._max_buffered_bytes:
                        raise Overloaded("too many large requests at the same time")
        except TimeoutError:
            raise HttpError(408, f"the body was not here in {self._read_timeout_s:g} s") from None
        else:
            return bytes(body)
        finally:
            # What was raised keeps this frame until the refusal is over, but not its megabytes.
            body.clear()
            self._buffered_bytes -= counted

    def _too_large(self) -> HttpError:
        return HttpError(413, f"the body may have at most {self._max_body_bytes} bytes")


def taken_body(scope: Scope) -> bytes:
    """The body, which nobody keeps longer than it takes to parse."""
    body: bytes = scope.pop(BODY)
    return body


class _Gone(Exception):
    """The client has left."""


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _unless_gone(work: Awaitable[None], receive: Receive) -> None:
    """Runs ``work``; cancels it and raises _Gone when the client leaves before it is done."""
    loop = asyncio.get_running_loop()
    working, gone = asyncio.ensure_future(work), loop.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if left := not working.done():
            working.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)
    if left:
        raise _Gone
    working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _as_ours(error: Exception) -> BatonError:
    if isinstance(error, HTTPException):
        return HttpError(error.status_code, error.detail)
    if isinstance(error, BatonError):
        if not is_for_clients(error) and not isinstance(error, HttpError):
            log.error("a handler failed", exc_info=error)
        return error
    log.error("a handler failed", exc_info=error)
    return InternalError("internal error")


async def _refuse(error: BatonError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers. Where the body was not read it is read on for a while, and dropped: a connection
    that is closed over unread bytes is reset, and the answer lost with it."""

    async def send_all_but_end(message: Message) -> None:
        await send({**message, "more_body": True} if "body" in message else message)

    if scope.get(_WHOLE):
        await error_response(error)(scope, receive, send)
        return
    await error_response(error)(scope, receive, send_all_but_end)
    with suppress(TimeoutError, _Gone):
        async with asyncio.timeout(_DISCARD_S):
            async for _ in _parts(receive):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
