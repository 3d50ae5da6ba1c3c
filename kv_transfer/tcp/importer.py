"""Reads the data ports of peers into the local pool."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence

import numpy as np

from common.errors import ConfigError, PeerLost
from common.failpoints import DROP, hit
from common.types import Epoch, WorkerId
from kv_transfer.base import (
    BlockCopy,
    CancelFlag,
    FetchResult,
    KVImporter,
    LeaseProof,
    Peer,
    TcpAddress,
    TransportSettings,
)
from kv_transfer.checksum import required_hasher
from kv_transfer.copying import check_row, go_on
from kv_transfer.layout import require_compatible
from kv_transfer.memory import PoolMemory
from kv_transfer.tcp import frames
from kv_transfer.tcp.frames import ANSWER, ASK, FIRST_FRAME, MAGIC, NAME, VERSION
from kv_transfer.tcp.security import client_context, require_plain_allowed
from kv_transfer.tcp.stream import Port, Stream, dial, receive, receive_into

# Times to connect again without having got one more block.
MAX_FRUITLESS_TRIES = 2


class TcpImporter(KVImporter):
    """One connection a fetch, on the transfer thread's own event loop."""

    name = NAME

    def __init__(self, pool: PoolMemory, settings: TransportSettings) -> None:
        self._pool = pool
        self._insecure = settings.insecure
        self._context = client_context(settings)
        self._hash = required_hasher(pool.layout.checksum, NAME)
        self._loop = asyncio.SelectorEventLoop()
        self._ports: dict[tuple[WorkerId, Epoch], Port] = {}

    def connect(self, peer: Peer) -> None:
        require_compatible(self._pool.layout, peer.layout)
        if (peer.worker_id, peer.epoch) in self._ports:
            return
        try:
            port = self._resolve(peer)
            self._loop.run_until_complete(dial(self._loop, port)).close()
        except OSError as error:
            raise PeerLost(f"the data port of {peer.worker_id} cannot be reached") from error
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

    def _resolve(self, peer: Peer) -> Port:
        """Raises PeerLost, and OSError where the name is not known."""
        for address in peer.addresses:
            if isinstance(address, TcpAddress):
                break
        else:
            raise PeerLost(f"{peer.worker_id} has no data port")
        if address.tls and self._context is None:
            raise PeerLost(f"the data port of {peer.worker_id} wants TLS; this worker has no files")
        if not address.tls:
            try:
                require_plain_allowed(address.host, self._insecure)
            except ConfigError as error:
                raise PeerLost(error.message) from None
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, _, _, _, target = found[0]
        return Port(address.host, family, target, self._context if address.tls else None)

    async def _receive_all(
        self,
        port: Port,
        proof: LeaseProof,
        copies: Sequence[BlockCopy],
        cancel: CancelFlag,
    ) -> None:
        """Goes on from where a connection broke, as long as each one brings something."""
        first = num_fruitless = 0
        while first < len(copies):
            before = first
            try:
                with contextlib.closing(await dial(self._loop, port)) as stream:
                    await self._ask(stream, proof, first, len(copies))
                    for copy in copies[first:]:
                        go_on(cancel)
                        await self._receive_block(stream, copy)
                        first += 1
            except TimeoutError as error:  # the cause tells a link that others need not try
                raise PeerLost("an exporter stopped sending") from error
            except (OSError, EOFError):
                num_fruitless = num_fruitless + 1 if first == before else 0
                if num_fruitless > MAX_FRUITLESS_TRIES:
                    raise PeerLost("an exporter hung up") from None

    async def _ask(self, stream: Stream, proof: LeaseProof, first: int, num_claimed: int) -> None:
        hello = FIRST_FRAME.pack(MAGIC, VERSION, bytes.fromhex(proof.lease_id), proof.secret)
        async with asyncio.timeout(frames.STALL_S):
            await stream.send(hello + ASK.pack(first, num_claimed - first))
            answer = await receive(stream, ANSWER.size)
        if len(answer) < ANSWER.size:
            raise EOFError
        if ANSWER.unpack(answer) != (num_claimed, self._pool.layout.block_bytes):
            raise PeerLost("an exporter serves another claim than ours")

    async def _receive_block(self, stream: Stream, copy: BlockCopy) -> None:
        row = self._pool.rows[copy.target.block_id]
        into = np.empty_like(row) if hit("decode.copy_block") == DROP else row
        await receive_into(self._loop, stream, into.data)
        check_row(row, copy, self._hash)
