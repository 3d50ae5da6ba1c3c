"""Hand-off over TCP, for workers that share no memory: straight from pool to pool, no staging.

The life of a connection, which serves one claimed lease::

    1. first frame   importer: magic, version, lease id, secret. Anything else, or nothing for a
                     while, and the exporter hangs up without a word.
    2. answer        exporter: number of claimed blocks, bytes of a block
    3. ask           importer: first and number of positions in the claim's order, any number of
                     times; what reaches out of the claim is hung up on
    4. blocks        exporter: their bytes as they lie in the pool, one after the other

The importer receives into the target block itself and checks it there. Cut off in the middle, it
connects again and asks for what is missing. When the lease ends the exporter hangs up, in the
middle of a block too; nobody could use that copy any more.

Not encrypted: off loopback both ends refuse unless settings say that the network is trusted.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.errors import ConfigError, PeerLost
from common.failpoints import DROP, hit
from common.types import BlockRef, Epoch, WorkerId
from kv_transfer.base import (
    BlockCopy,
    CancelFlag,
    FetchResult,
    KVExporter,
    KVImporter,
    LeaseProof,
    Peer,
    TcpAddress,
    TransportSettings,
)
from kv_transfer.checksum import required_hasher
from kv_transfer.copying import check_row, go_on, seal_rows
from kv_transfer.layout import require_compatible
from kv_transfer.lease import LEASE_ID_BYTES, SECRET_BYTES
from kv_transfer.memory import PoolMemory

log = logging.getLogger(__name__)

NAME = "tcp"
MAGIC = b"BTKV"
VERSION = 1
FIRST_FRAME = struct.Struct(f"!4sH{LEASE_ID_BYTES}s{SECRET_BYTES}s")
ANSWER = struct.Struct("!IQ")
ASK = struct.Struct("!II")

# A peer that sends nothing for so long is dead (timers of docs/design.md).
STALL_S = 3.0
# What a stranger can hold of us: so many connections, each for so long.
HANDSHAKE_S = 2.0
MAX_HANDSHAKES = 64
# Times to connect again without having got one more block.
MAX_FRUITLESS_TRIES = 2


@dataclass(slots=True)
class _Served:
    """A claimed lease and the connections that are under it."""

    secret: bytes
    blocks: tuple[BlockRef, ...]
    connections: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Port:
    """A peer's data port, its name resolved: an address as `socket` knows them."""

    family: int
    target: tuple[Any, ...]


class TcpExporter(KVExporter):
    """The data port, on a thread and an event loop of its own."""

    name = NAME

    def __init__(self, pool: PoolMemory, settings: TransportSettings) -> None:
        _require_trusted(settings.host, settings.insecure)
        self._pool = pool
        self._hash = required_hasher(pool.layout.checksum, NAME)
        self._leases: dict[bytes, _Served] = {}
        self._num_handshakes = 0
        self._num_strangers = 0
        try:
            self._listener = socket.create_server((settings.host, 0))
        except OSError as error:
            raise ConfigError("host", f"cannot listen on {settings.host}: {error}") from None
        self._listener.setblocking(False)
        self._address = TcpAddress(settings.advertise_host, self._listener.getsockname()[1])
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
        """Until it is cancelled, and with it every connection."""
        async with asyncio.TaskGroup() as group:
            while True:
                connection, _ = await self._loop.sock_accept(self._listener)
                if self._num_handshakes >= MAX_HANDSHAKES:
                    self._num_strangers += 1
                    connection.close()
                    continue
                self._num_handshakes += 1
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                group.create_task(self._serve(connection), name="kv-connection")

    async def _serve(self, connection: socket.socket) -> None:
        with contextlib.closing(connection), contextlib.suppress(OSError, EOFError):
            served = await self._greet(connection)
            if served is None:
                self._num_strangers += 1
                return
            task = asyncio.current_task()
            assert task is not None
            served.connections.add(task)
            try:
                await self._answer(connection, served)
            finally:
                served.connections.discard(task)

    async def _greet(self, connection: socket.socket) -> _Served | None:
        """The lease that the first frame opens."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                frame = await _receive(self._loop, connection, FIRST_FRAME.size)
        except TimeoutError:
            return None
        finally:
            self._num_handshakes -= 1
        magic, version, lease_id, secret = FIRST_FRAME.unpack(frame)
        served = self._leases.get(lease_id)
        expected = served.secret if served is not None else bytes(SECRET_BYTES)
        proved = hmac.compare_digest(expected, secret)
        return served if proved and (magic, version) == (MAGIC, VERSION) else None

    async def _answer(self, connection: socket.socket, served: _Served) -> None:
        send, rows = self._loop.sock_sendall, self._pool.rows
        await send(connection, ANSWER.pack(len(served.blocks), rows.shape[1]))
        while True:
            first, count = ASK.unpack(await _receive(self._loop, connection, ASK.size))
            if first + count > len(served.blocks):
                self._num_strangers += 1
                return
            for block in served.blocks[first : first + count]:
                await send(connection, rows[block.block_id].data)


class TcpImporter(KVImporter):
    """One connection a fetch, on the transfer thread's own event loop."""

    name = NAME

    def __init__(self, pool: PoolMemory, settings: TransportSettings) -> None:
        self._pool = pool
        self._insecure = settings.insecure
        self._hash = required_hasher(pool.layout.checksum, NAME)
        self._loop = asyncio.SelectorEventLoop()
        self._ports: dict[tuple[WorkerId, Epoch], _Port] = {}

    def connect(self, peer: Peer) -> None:
        require_compatible(self._pool.layout, peer.layout)
        if (peer.worker_id, peer.epoch) in self._ports:
            return
        try:
            port = self._resolve(peer)
            self._loop.run_until_complete(_dial(self._loop, port)).close()
        except OSError:
            raise PeerLost(f"the data port of {peer.worker_id} cannot be reached") from None
        self._ports[peer.worker_id, peer.epoch] = port

    def fetch(
        self, peer: Peer, proof: LeaseProof, copies: Sequence[BlockCopy], cancel: CancelFlag
    ) -> FetchResult:
        start_s = time.monotonic()
        self.connect(peer)
        port = self._ports[peer.worker_id, peer.epoch]
        self._loop.run_until_complete(self._receive_all(port, proof, copies, cancel))
        return FetchResult(
            num_blocks=len(copies),
            num_bytes=len(copies) * self._pool.layout.block_bytes,
            duration_s=time.monotonic() - start_s,
            transport=NAME,
        )

    def forget(self, worker_id: WorkerId, epoch: Epoch) -> None:
        self._ports.pop((worker_id, epoch), None)

    def close(self) -> None:
        self._loop.close()

    def _resolve(self, peer: Peer) -> _Port:
        for address in peer.addresses:
            if isinstance(address, TcpAddress):
                break
        else:
            raise PeerLost(f"{peer.worker_id} has no data port")
        try:
            _require_trusted(address.host, self._insecure)
        except ConfigError as error:
            raise PeerLost(error.message) from None
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, _, _, _, target = found[0]
        return _Port(family, target)

    async def _receive_all(
        self,
        port: _Port,
        proof: LeaseProof,
        copies: Sequence[BlockCopy],
        cancel: CancelFlag,
    ) -> None:
        """Goes on from where a connection broke, as long as each one brings something."""
        first = num_fruitless = 0
        while first < len(copies):
            before = first
            try:
                with contextlib.closing(await _dial(self._loop, port)) as connection:
                    await self._ask(connection, proof, first, len(copies))
                    for copy in copies[first:]:
                        go_on(cancel)
                        await self._receive_block(connection, copy)
                        first += 1
            except TimeoutError:
                raise PeerLost("an exporter stopped sending") from None
            except (OSError, EOFError):
                num_fruitless = num_fruitless + 1 if first == before else 0
                if num_fruitless > MAX_FRUITLESS_TRIES:
                    raise PeerLost("an exporter hung up") from None

    async def _ask(
        self, connection: socket.socket, proof: LeaseProof, first: int, num_claimed: int
    ) -> None:
        hello = FIRST_FRAME.pack(MAGIC, VERSION, bytes.fromhex(proof.lease_id), proof.secret)
        ask = ASK.pack(first, num_claimed - first)
        async with asyncio.timeout(STALL_S):
            await self._loop.sock_sendall(connection, hello + ask)
            answer = ANSWER.unpack(await _receive(self._loop, connection, ANSWER.size))
        if answer != (num_claimed, self._pool.layout.block_bytes):
            raise PeerLost("an exporter serves another claim than ours")

    async def _receive_block(self, connection: socket.socket, copy: BlockCopy) -> None:
        row = self._pool.rows[copy.target.block_id]
        into = np.empty_like(row) if hit("decode.copy_block") == DROP else row
        await _receive_into(self._loop, connection, into.data)
        check_row(row, copy, self._hash)


async def _dial(loop: asyncio.AbstractEventLoop, port: _Port) -> socket.socket:
    connection = socket.socket(port.family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(STALL_S):
            await loop.sock_connect(connection, port.target)
    except BaseException:
        connection.close()
        raise
    return connection


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, size: int) -> bytes:
    """Exactly ``size`` bytes, small and with all the time its caller allows. Raises EOFError."""
    data = bytearray(size)
    view = memoryview(data)
    while len(view):
        num_received = await loop.sock_recv_into(sock, view)
        if not num_received:
            raise EOFError
        view = view[num_received:]
    return bytes(data)


async def _receive_into(
    loop: asyncio.AbstractEventLoop, sock: socket.socket, view: memoryview
) -> None:
    """Fills ``view``. Raises EOFError, or TimeoutError when nothing comes for STALL_S."""
    async with asyncio.timeout(STALL_S) as stall:
        while len(view):
            num_received = await loop.sock_recv_into(sock, view)
            if not num_received:
                raise EOFError
            view = view[num_received:]
            stall.reschedule(loop.time() + STALL_S)


def _cancel_all(served: _Served) -> None:
    for task in served.connections:
        task.cancel()


def _require_trusted(host: str, insecure: bool) -> None:
    """Raises ConfigError where bytes would leave this machine in the clear unasked."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and not insecure:
        raise ConfigError(
            "insecure_transfer", f"KV over tcp to {host} is not encrypted; allow it if it may be"
        )
