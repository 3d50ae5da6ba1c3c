"""The public HTTP port: uvicorn, with limits on what a client can make it hold and wait for."""

import asyncio
import json
import socket
import time
from typing import Any, ClassVar

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
# Each part of a body costs h11 some 10 us, on the event loop of all streams and before any key is
# looked at: so many are free, and then one for so many bytes.
_FREE_PARTS = 1024
_MIN_PART_BYTES = 64


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
        idle: ClassVar[dict[BoundedProtocol, None]] = {}

    return Bounded


class _CoarseConnection(h11.Connection):
    """h11's, which takes a body in crumbs of one byte for as long as they come."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self._parts_left = _FREE_PARTS
        self._spare_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Data):
            gained, self._spare_bytes = divmod(self._spare_bytes + len(event.data), _MIN_PART_BYTES)
            self._parts_left += gained - 1
            if self._parts_left < 0:
                raise h11.RemoteProtocolError("a body in too many parts")
        elif isinstance(event, h11.Request):
            self._parts_left, self._spare_bytes = _FREE_PARTS, 0
        return event


class BoundedProtocol(H11Protocol):
    """uvicorn's, which waits for headers for ever and answers bad ones with plain text.

    Where there are as many connections as there may be, a new one takes the place of the one that
    has been idle for longest, so that connections that nobody uses shut nobody out. ``idle`` holds
    those that are in no request, the one that became so first in front.
    """

    limits: tuple[int, float]
    idle: ClassVar[dict["BoundedProtocol", None]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _CoarseConnection()
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits[0] and not self._takes_the_place_of_an_idle_one():
            self._refuse(HttpError(503, "too many connections"), ((b"retry-after", b"1"),))
            self.transport.close()
        self._watch()

    def _takes_the_place_of_an_idle_one(self) -> bool:
        oldest = next(iter(self.idle), None)
        if oldest is None:
            return False
        del self.idle[oldest]
        oldest._refused = True
        oldest.transport.close()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(
            HttpError(
                400,
                f"no valid HTTP request, headers above {MAX_HEADER_BYTES} bytes, or a body in "
                "too many parts",
            )
        )

    def _watch(self) -> None:
        """The clock runs while headers are awaited, but not between two requests: there uvicorn's
        own does."""
        if self._refused or self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self.idle.pop(self, None)
        else:
            self.idle.setdefault(self)
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
        if self.cycle is not None and not self.cycle.response_complete:
            # The application is in the middle of it: what it still says is dropped.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
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
