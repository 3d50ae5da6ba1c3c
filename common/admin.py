"""A process' admin port: health and metrics for anyone, the debug pages for who has the token.

::

    GET /health         200, or 503 while not ready; no body
    GET /metrics        Prometheus text
    GET /debug/<name>   JSON; needs ``Authorization: Bearer <run token>``
    POST /debug/failpoints  arms the body's spec (common/failpoints.py), GET tells how often each
                        armed place was reached; the token too, and only where they are allowed
"""

import hmac
import inspect
from collections.abc import Callable, Mapping

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from common import failpoints
from common.errors import ConfigError
from common.web import WebServer

Page = Callable[[], object]
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CLOSE_S = 2.0
_MAX_SPEC_BYTES = 4096


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
        allow_failpoints: bool = False,
    ) -> None:
        self._token = token
        self._health = health
        self._metrics = metrics
        self._debug = debug
        routes = [
            Route("/health", self._get_health),
            Route("/metrics", self._get_metrics),
            Route("/debug/{name}", self._get_debug),
        ]
        if allow_failpoints:
            routes.insert(0, Route("/debug/failpoints", self._arm, methods=["GET", "POST"]))
        app = Starlette(routes=routes)
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
        self._server = WebServer(config, host, port, setting="admin_port")

    async def start(self) -> int:
        return await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(_CLOSE_S)

    async def _get_health(self, _: Request) -> Response:
        return Response(status_code=200 if self._health() else 503)

    async def _get_metrics(self, _: Request) -> Response:
        return Response(self._metrics(), media_type=_METRICS_TYPE)

    async def _get_debug(self, request: Request) -> Response:
        self._check_token(request)
        page = self._debug.get(request.path_params["name"])
        if page is None:
            raise HTTPException(404)
        content = page()
        return JSONResponse(await content if inspect.isawaitable(content) else content)

    async def _arm(self, request: Request) -> Response:
        self._check_token(request)
        if request.method != "POST":
            return JSONResponse(failpoints.num_hits())
        spec = b""
        async for part in request.stream():
            spec += part
            if len(spec) > _MAX_SPEC_BYTES:
                raise HTTPException(413)
        try:
            failpoints.arm(spec.decode())
        except (ConfigError, UnicodeDecodeError) as error:
            raise HTTPException(400, str(error)) from None
        return Response(status_code=204)

    def _check_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if not self._token or not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise HTTPException(401)
