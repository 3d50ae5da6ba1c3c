"""The data port: serves the blocks of claimed leases to those who prove the claim."""

import asyncio
import contextlib
import hmac
import logging
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.errors import ConfigError
from common.types import BlockRef
from kv_transfer.base import KVExporter, LeaseProof, TcpAddress, TransportSettings
from kv_transfer.checksum import required_hasher
from kv_transfer.copying import seal_rows
from kv_transfer.lease import SECRET_BYTES
from kv_transfer.memory import PoolMemory
from kv_transfer.tcp.frames import ANSWER, ASK, FIRST_FRAME, MAGIC, NAME, VERSION
from kv_transfer.tcp.security import server_context
from kv_transfer.tcp.stream import Stream, accepted, readable, receive

log = logging.getLogger(__name__)

# What strangers can hold of us: so many connections, each for so long. One more, and the oldest
# has to go: who has a proof shows it at once, and so gets in whoever else is at the door.
HANDSHAKE_S = 2.0
MAX_HANDSHAKES = 64
# Before the next try to accept, where this process has no file descriptor left.
_NO_DESCRIPTOR_S = 0.1


@dataclass(slots=True)
class _Served:
    """A claimed lease and the connections that are under it."""

    secret: bytes
    blocks: tuple[BlockRef, ...]
    connections: set[asyncio.Task[None]] = field(default_factory=set)


class TcpExporter(KVExporter):
    """The data port, on a thread and an event loop of its own."""

    name = NAME

    def __init__(self, pool: PoolMemory, settings: TransportSettings) -> None:
        self._context = server_context(settings)
        self._pool = pool
        self._hash = required_hasher(pool.layout.checksum, NAME)
        self._leases: dict[bytes, _Served] = {}
        # Connections that have not proved anything yet, oldest first.
        self._greeting: dict[asyncio.Task[None], None] = {}
        self._num_strangers = 0
        try:
            family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
            self._listener = socket.create_server((settings.host, 0), family=family)
        except OSError as error:
            raise ConfigError("host", f"cannot listen on {settings.host}: {error}") from None
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self._address = TcpAddress(settings.advertise_host, port, tls=self._context is not None)
        self._loop = asyncio.SelectorEventLoop()
        self._accepting = self._loop.create_task(self._accept(), name="kv-accept")
        self._thread = threading.Thread(target=self._run, name="kv-data-port", daemon=True)
        self._thread.start()

    def address(self) -> TcpAddress:
        return self._address

    @property
    def num_strangers(self) -> int:
        return self._num_strangers

    def seal(self, blocks: Sequence[BlockRef]) -> tuple[int, ...]:
        return seal_rows(self._pool.rows, blocks, self._hash)

    def send(self, proof: LeaseProof, blocks: Sequence[BlockRef]) -> None:
        self._leases[bytes.fromhex(proof.lease_id)] = _Served(proof.secret, tuple(blocks))

    def revoke(self, lease_id: str) -> None:
        served = self._leases.pop(bytes.fromhex(lease_id), None)
        if served is not None:
            self._loop.call_soon_threadsafe(_cancel_all, served)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._accepting.cancel)
            self._thread.join()

    # ------------------------------------------------------------ on the data port's thread

    def _run(self) -> None:
        with (
            contextlib.closing(self._loop),
            contextlib.closing(self._listener),
            contextlib.suppress(asyncio.CancelledError),
        ):
            self._loop.run_until_complete(self._accepting)

    async def _accept(self) -> None:
        """Until it is cancelled, and with it every connection. Nothing is awaited while a
        connection has no owner: it would stay open if the cancelling came just then."""
        async with asyncio.TaskGroup() as group:
            while True:
                await readable(self._loop, self._listener)
                try:
                    connection, _ = self._listener.accept()
                except (BlockingIOError, ConnectionError):
                    continue  # it is gone already
                except OSError as error:
                    log.warning("the data port cannot accept: %s", error)
                    await asyncio.sleep(_NO_DESCRIPTOR_S)
                    continue
                self._admit(accepted(self._loop, connection, self._context), group)

    def _admit(self, stream: Stream, group: asyncio.TaskGroup) -> None:
        """The stream is closed when its task ends, one that is cancelled before it ran too."""
        if len(self._greeting) >= MAX_HANDSHAKES:
            oldest = next(iter(self._greeting))
            del self._greeting[oldest]
            oldest.cancel()
            self._num_strangers += 1
        task = group.create_task(self._serve(stream), name="kv-connection")
        task.add_done_callback(lambda _: stream.close())
        self._greeting[task] = None

    async def _serve(self, stream: Stream) -> None:
        """Raises nothing: the port serves others."""
        try:
            await self._converse(stream)
        except OSError:
            pass  # the importer is gone; it comes again if it wants more
        except Exception:
            log.exception("a connection to the data port failed")

    async def _converse(self, stream: Stream) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            served = await self._greet(stream)
        finally:
            self._greeting.pop(task, None)
        if served is None:
            return
        served.connections.add(task)
        try:
            await self._answer(stream, served)
        finally:
            served.connections.discard(task)

    async def _greet(self, stream: Stream) -> _Served | None:
        """The lease that the first frame opens. Only who hangs up without a word is not counted
        as a stranger: an importer does so to learn whether the port can be reached."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await stream.shake_hands()
                frame = await receive(stream, FIRST_FRAME.size)
        except OSError:  # TimeoutError and ssl.SSLError are some too
            served = None
        else:
            if not frame:
                return None
            served = self._lease_of(frame)
        if served is None:
            self._num_strangers += 1
        return served

    def _lease_of(self, frame: bytes) -> _Served | None:
        if len(frame) < FIRST_FRAME.size:
            return None
        magic, version, lease_id, secret = FIRST_FRAME.unpack(frame)
        served = self._leases.get(lease_id)
        expected = served.secret if served is not None else bytes(SECRET_BYTES)
        proved = hmac.compare_digest(expected, secret)
        return served if proved and (magic, version) == (MAGIC, VERSION) else None

    async def _answer(self, stream: Stream, served: _Served) -> None:
        rows = self._pool.rows
        await stream.send(ANSWER.pack(len(served.blocks), rows.shape[1]))
        while len(frame := await receive(stream, ASK.size)) == ASK.size:
            first, count = ASK.unpack(frame)
            if first + count > len(served.blocks):
                self._num_strangers += 1
                return
            for block in served.blocks[first : first + count]:
                await stream.send(rows[block.block_id].data)
                # A send that need not wait lets nobody else run: not even the lease's end.
                await asyncio.sleep(0)


def _cancel_all(served: _Served) -> None:
    for task in served.connections:
        task.cancel()
