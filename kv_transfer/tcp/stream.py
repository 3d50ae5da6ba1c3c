"""One connection of an event loop, plain or TLS: bytes go from and to the caller's own memory,
without the buffers of asyncio's streams."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from kv_transfer.tcp import frames

T = TypeVar("T")

# What goes through TLS at a time; a connection holds twice as much.
_CHUNK_BYTES = 1 << 17


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
    """``host``: the name in the certificate that the dialled end must show; None at that end.
    OpenSSL decrypts straight into the caller's memory, many records for one wake-up."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        context: ssl.SSLContext,
        host: str | None,
    ) -> None:
        super().__init__(loop, connection)
        self._encrypted = memoryview(bytearray(_CHUNK_BYTES))
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=host is None, server_hostname=host
        )

    async def shake_hands(self) -> None:
        await super().shake_hands()
        await self._run(self._tls.do_handshake)

    async def send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _CHUNK_BYTES):
            await self._run(partial(self._tls.write, view[start : start + _CHUNK_BYTES]))

    async def receive_some(self, into: memoryview) -> int:
        num_received = 0
        with contextlib.suppress(ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLWantReadError):
            num_received = await self._run(partial(self._read, into))
            while num_received < len(into):  # all records that are here already
                num_received += self._read(into[num_received:])
        return num_received

    def _read(self, into: memoryview) -> int:
        """One record, or what is left of it."""
        return cast(int, self._tls.read(len(into), into))  # type checkers know it without `into`

    async def _run(self, call: Callable[[], T]) -> T:
        """The result of ``call``, which is tried again whenever more has come that it may need."""
        while True:
            try:
                result = call()
            except ssl.SSLWantReadError:
                await self._flush()
                num_received = await super().receive_some(self._encrypted)
                if num_received:
                    self._incoming.write(self._encrypted[:num_received])
                else:
                    self._incoming.write_eof()
            else:
                await self._flush()
                return result

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await super().send(self._outgoing.read())


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


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
