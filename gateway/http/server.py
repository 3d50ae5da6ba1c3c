"""The public HTTP port: uvicorn, with limits on what a client can make it hold and wait for."""

import asyncio
import json
import socket
import time
from typing import Any

import h11
import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.config import GatewaySettings
from common.web import WebServer
from gateway.gateway import Gateway
from gateway.http.edge import Edge
from gateway.http.errors import HttpError, error_body
from gateway.http.routes import Routes
from gateway.metrics import exposition
from gateway.serving import Service
from gateway.tokenizer import IdTokenizer

MAX_HEADER_BYTES = 64 << 10
_KEEP_ALIVE_S = 30
_CLOSE_S = 2
# How long what follows bad headers is still read, so that its sender gets to the answer.
_DISCARD_S = 2.0


def make_http_server(
    settings: GatewaySettings, gateway: Gateway, service: Service, tokenizer: IdTokenizer
) -> WebServer:
    """Raises ConfigError for TLS files that cannot be used."""
    tls = settings.public_tls
    if tls is not None:
        tls.server_context()
    routes = Routes(
        service,
        tokenizer,
        is_ready=lambda: gateway.ready,
        metrics=lambda: exposition(gateway),
        created=int(time.time()),
    )
    app: ASGIApp = Edge(
        routes.router(), service.keys, settings.max_message_bytes, settings.http_read_timeout_s
    )
    if origins := [part.strip() for part in settings.cors_origin.split(",") if part.strip()]:
        app = CORSMiddleware(
            app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    config = uvicorn.Config(
        app,
        http=_bounded(settings.http_max_connections, settings.http_read_timeout_s),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        ssl_context_factory=None if tls is None else (lambda *_: tls.server_context()),
        log_config=None,
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        ws="none",
    )
    return WebServer(
        config, settings.host, settings.http_port, "http_port", _socket_options(settings)
    )


def _socket_options(settings: GatewaySettings) -> tuple[tuple[int, int, int], ...]:
    """Whoever takes nothing for so long, or is silently gone, is dropped by the kernel."""
    keep_alive = ((socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),)
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return keep_alive
    return (
        *keep_alive,
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(settings.slow_client_s * 1000)),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    )


def _bounded(max_connections: int, header_timeout_s: float) -> type[H11Protocol]:
    """uvicorn makes one for each connection and gives it nothing of ours."""

    class Bounded(BoundedProtocol):
        limits = (max_connections, header_timeout_s)

    return Bounded


class BoundedProtocol(H11Protocol):
    """uvicorn's, which waits for headers for ever and answers bad ones with plain text."""

    limits: tuple[int, float]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self.limits[0]:
            self._refuse(HttpError(503, "too many connections"), ((b"retry-after", b"1"),))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            HttpError(400, f"no valid HTTP request, or headers above {MAX_HEADER_BYTES} bytes")
        )

    def _watch(self) -> None:
        """The clock runs while headers are awaited, but not between two requests: there uvicorn's
        own does."""
        waiting = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if self._refused or not waiting:
            self._cancel_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.limits[1], self._too_slow)

    def _too_slow(self) -> None:
        self._timer = None
        self._refuse(HttpError(408, f"the headers were not here in {self.limits[1]:g} s"))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: HttpError, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Answers and closes, without an application and without h11, whose state is that of an
        error."""
        if self.transport.is_closing():
            return
        self._refused = True
        self._cancel_timer()
        body = json.dumps(error_body(error)).encode()
        lines = (
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *headers,
        )
        head = b"HTTP/1.1 %d \r\n" % error.status + b"".join(b"%s: %s\r\n" % line for line in lines)
        self.transport.write(head + b"\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_DISCARD_S, self.transport.close)
