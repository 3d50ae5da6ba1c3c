"""A process' admin port: health and metrics for anyone, the debug pages for who has the token.

::

    GET /health         200, or 503 while not ready; no body
    GET /metrics        Prometheus text
    GET /debug/<name>   JSON; needs ``Authorization: Bearer <run token>``
"""

import asyncio
import hmac
import inspect
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from common.errors import ConfigError

log = logging.getLogger(__name__)

Page = Callable[[], object]
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CLOSE_S = 2.0


class AdminServer:
    """Serves in the running event loop. ``health`` and ``metrics`` are called on each request;
    ``debug`` maps names to functions, or coroutine functions, that return what JSON can hold.
    Raises ConfigError where it cannot listen (0: a free port); `start` returns the port."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        health: Callable[[], bool],
        metrics: Callable[[], str],
        debug: Mapping[str, Page],
    ) -> None:
        self._address = (host, port)
        self._token = token
        self._health = health
        self._metrics = metrics
        self._debug = debug
        self._task: asyncio.Task[None] | None = None
        app = Starlette(
            routes=[
                Route("/health", self._get_health),
                Route("/metrics", self._get_metrics),
                Route("/debug/{name}", self._get_debug),
            ]
        )
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            ws="none",
            timeout_graceful_shutdown=1,
            date_header=False,
        )
        self._server = _Server(config)

    async def start(self) -> int:
        host, port = self._address
        try:
            listener = socket.create_server((host, port), family=_family(host))
        except OSError as error:
            raise ConfigError("admin_port", f"{host}:{port}: {error.strerror}") from None
        listener.setblocking(False)
        actual: int = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve([listener]), name="admin port")
        return actual

    async def stop(self) -> None:
        if self._task is None:
            return
        self._server.end.set()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._task
        except TimeoutError:
            log.warning("the admin port did not close in time")

    async def _get_health(self, _: Request) -> Response:
        return Response(status_code=200 if self._health() else 503)

    async def _get_metrics(self, _: Request) -> Response:
        return Response(self._metrics(), media_type=_METRICS_TYPE)

    async def _get_debug(self, request: Request) -> Response:
        given = request.headers.get("authorization", "").encode()
        if not self._token or not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise HTTPException(401)
        page = self._debug.get(request.path_params["name"])
        if page is None:
            raise HTTPException(404)
        content = page()
        return JSONResponse(await content if inspect.isawaitable(content) else content)


class _Server(uvicorn.Server):
    """Signals belong to the process, not to its admin port. Serves until ``end`` is set, instead of
    looking ten times a second whether it is to end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.end = asyncio.Event()

    async def main_loop(self) -> None:
        await self.end.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
