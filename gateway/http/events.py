"""Server-sent events: one answer as it comes, framed as OpenAI's clients and vLLM's read it.

``data: {json}`` and an empty line, by line feeds alone (clients split at them), ``data: [DONE]`` at
the end. What goes wrong after the first byte is an event too. While nothing comes a comment is
sent now and then, for what stands between and closes what is silent.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import BatonError, InternalError
from gateway.http.errors import error_body

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
_DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"


class EventStream(Response):
    """A response. ``resources`` hold what ``events`` needs; they are closed with the stream, and
    told how it ended."""

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        resources: AsyncExitStack,
        headers: Mapping[str, str],
    ) -> None:
        self._events = events
        self._resources = resources
        self.status_code = 200
        self.background = None
        self.init_headers(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                **headers,
            }
        )
        self._silent = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._resources:
                start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(start)
                keeping_alive = asyncio.get_running_loop().create_task(self._keep_alive(send))
                self._resources.callback(keeping_alive.cancel)
                async for event in self._events:
                    self._silent = False
                    await send(_body(_frame(event)))
        except BatonError as error:
            await send(_body(_frame(error_body(error))))
        except Exception:
            log.exception("a stream failed")
            await send(_body(_frame(error_body(InternalError("internal error")))))
        await send(_body(_DONE, more=False))

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            if self._silent:
                await send(_body(_COMMENT))
            self._silent = True


def _frame(event: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def _body(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
