"""One connection of an event loop, plain or TLS: bytes go from and to the caller's own memory.

asyncio's streams would put a buffer in between, and its socket calls take no TLS socket; so
`TlsStream` waits for the socket itself, and OpenSSL decrypts into the target block.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kv_transfer.tcp import frames

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Port:
    """A peer's data port, its name resolved: ``target`` is an address as `socket` knows them.
    ``context``: of its TLS, in which it must show a certificate for ``host``."""

    host: str
    family: int
    target: tuple[Any, ...]
    context: ssl.SSLContext | None


class Stream:
    """A plain connection. It owns its socket; all but ``close`` may raise OSError."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        self._loop = loop
        self._socket = connection
        connection.setblocking(False)

    async def connect(self, target: tuple[Any, ...]) -> None:
        await self._loop.sock_connect(self._socket, target)

    async def shake_hands(self) -> None:
        """Comes first, at both ends."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def send(self, data: bytes | memoryview) -> None:
        await self._loop.sock_sendall(self._socket, data)

    async def receive_some(self, into: memoryview) -> int:
        """Number of bytes that came, 0 where the peer hung up."""
        return await self._loop.sock_recv_into(self._socket, into)

    def close(self) -> None:
        self._socket.close()


class TlsStream(Stream):
    """``host``: the name in the certificate that the dialled end must show; None at that end."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        context: ssl.SSLContext,
        host: str | None,
    ) -> None:
        super().__init__(loop, connection)
        self._context = context
        self._host = host

    async def shake_hands(self) -> None:
        await super().shake_hands()
        self._socket = self._tls = self._context.wrap_socket(
            self._socket,
            server_side=self._host is None,
            server_hostname=self._host,
            do_handshake_on_connect=False,
        )
        await self._when_ready(self._tls.do_handshake)

    async def send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            view = view[await self._when_ready(partial(self._tls.send, view)) :]

    async def receive_some(self, into: memoryview) -> int:
        return await self._when_ready(partial(self._tls.recv_into, into))

    async def _when_ready(self, call: Callable[[], T]) -> T:
        """The result of ``call``, which is tried again whenever the socket is ready for it."""
        while True:
            try:
                return call()
            except ssl.SSLWantReadError:
                await readable(self._loop, self._socket)
            except ssl.SSLWantWriteError:
                await _writable(self._loop, self._socket)


def accepted(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, context: ssl.SSLContext | None
) -> Stream:
    """The stream of a connection to a listener of ours; its ``shake_hands`` is still to be done."""
    if context is None:
        return Stream(loop, connection)
    return TlsStream(loop, connection, context, host=None)


async def dial(loop: asyncio.AbstractEventLoop, port: Port) -> Stream:
    """Raises OSError, TimeoutError after STALL_S."""
    connection = socket.socket(port.family, socket.SOCK_STREAM)
    if port.context is None:
        stream = Stream(loop, connection)
    else:
        stream = TlsStream(loop, connection, port.context, port.host)
    try:
        async with asyncio.timeout(frames.STALL_S):
            await stream.connect(port.target)
            await stream.shake_hands()
    except BaseException:
        stream.close()
        raise
    return stream


async def receive(stream: Stream, size: int) -> bytes:
    """``size`` bytes, fewer where the peer hung up before, with all the time its caller allows."""
    data = bytearray(size)
    view = memoryview(data)
    with contextlib.suppress(ConnectionError):
        while len(view) and (num_received := await stream.receive_some(view)):
            view = view[num_received:]
    return bytes(data[: size - len(view)])


async def receive_into(loop: asyncio.AbstractEventLoop, stream: Stream, view: memoryview) -> None:
    """Fills ``view``. Raises EOFError, or TimeoutError when nothing comes for STALL_S."""
    async with asyncio.timeout(frames.STALL_S) as stall:
        while len(view):
            num_received = await stream.receive_some(view)
            if not num_received:
                raise EOFError
            view = view[num_received:]
            stall.reschedule(loop.time() + frames.STALL_S)


async def readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready = loop.create_future()
    loop.add_reader(sock, _set, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


async def _writable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready = loop.create_future()
    loop.add_writer(sock, _set, ready)
    try:
        await ready
    finally:
        loop.remove_writer(sock)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
