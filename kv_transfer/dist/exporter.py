"""The bells of importers: sends the blocks of claimed leases to those who prove the claim."""

import contextlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from common.types import BlockRef
from kv_transfer.base import DistAddress, KVExporter, LeaseProof, TransportSettings
from kv_transfer.copying import seal_rows
from kv_transfer.dist.backend import GLOO, NCCL, Backend
from kv_transfer.dist.bell import (
    ASK,
    DONE,
    GROUP_NAME_BYTES,
    MAGIC,
    STALL_S,
    Answer,
    hang_up,
    receive,
)
from kv_transfer.dist.group import EXPORTER, PairGroup, named, serve_store
from kv_transfer.lease import SECRET_BYTES
from kv_transfer.memory import PoolMemory

log = logging.getLogger(__name__)

# As at the data port of tcp: so many strangers at the door, each for so long; one more, and the
# oldest has to go.
HANDSHAKE_S = 2.0
MAX_HANDSHAKES = 64
# Before the next try to accept, where this process has no file descriptor left.
_NO_DESCRIPTOR_S = 0.1


@dataclass(slots=True)
class _Claim:
    """A claimed lease. ``pair``: the one whose thread is sending it just now."""

    secret: bytes
    blocks: tuple[BlockRef, ...]
    revoked: bool = False
    pair: "_Pair | None" = None


@dataclass(slots=True, eq=False)
class _Pair:
    """One importer's bell; the group comes with its first proof."""

    bell: socket.socket
    group: PairGroup | None = None

    def end(self) -> None:
        """From any thread: its own thread then cleans up."""
        if self.group is not None:
            self.group.abort()
        hang_up(self.bell)


class DistExporter(KVExporter):
    """A thread that accepts bells, and one for each pair, which sends what its bell asks for."""

    def __init__(self, pool: PoolMemory, settings: TransportSettings) -> None:
        self._pool = pool
        self._backend = Backend(self.name, pool, settings)
        self._host = settings.host
        self._lock = threading.Lock()
        self._claims: dict[bytes, _Claim] = {}
        self._pairs: dict[_Pair, threading.Thread] = {}
        # Pairs that have not proved anything yet, oldest first.
        self._greeting: dict[_Pair, None] = {}
        self._num_strangers = 0
        try:
            family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
            self._listener = socket.create_server((settings.host, 0), family=family)
        except OSError as error:
            raise ConfigError("host", f"cannot listen on {settings.host}: {error}") from None
        port = self._listener.getsockname()[1]
        uuid = self._backend.device_uuid
        self._address = DistAddress(self.name, settings.advertise_host, port, uuid)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"kv-{self.name}", daemon=True)
        self._thread.start()

    def address(self) -> DistAddress:
        return self._address

    @property
    def num_strangers(self) -> int:
        return self._num_strangers

    def seal(self, blocks: Sequence[BlockRef]) -> tuple[int, ...]:
        if self._pool.device is not None:
            self._pool.device.synchronize()
        return seal_rows(self._pool.rows, blocks, self._backend.hash)

    def send(self, proof: LeaseProof, blocks: Sequence[BlockRef]) -> None:
        """From now on whoever rings with this proof is sent these blocks."""
        with self._lock:
            self._claims[bytes.fromhex(proof.lease_id)] = _Claim(proof.secret, tuple(blocks))

    def revoke(self, lease_id: str) -> None:
        with self._lock:
            claim = self._claims.pop(bytes.fromhex(lease_id), None)
            if claim is None:
                return
            claim.revoked = True
            if claim.pair is not None:
                claim.pair.end()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        hang_up(self._listener)
        self._thread.join()
        with self._lock:
            pairs = dict(self._pairs)
        for pair in pairs:
            pair.end()
        for thread in pairs.values():
            thread.join()

    # ------------------------------------------------------------ on the accepting thread

    def _accept(self) -> None:
        with contextlib.closing(self._listener):
            while not self._closing.is_set():
                try:
                    bell, _ = self._listener.accept()
                except ConnectionError:
                    continue
                except OSError as error:
                    if not self._closing.is_set():
                        log.warning("%s cannot accept: %s", self.name, error)
                        self._closing.wait(_NO_DESCRIPTOR_S)
                    continue
                self._admit(_Pair(bell))

    def _admit(self, pair: _Pair) -> None:
        thread = threading.Thread(target=self._serve, args=(pair,), daemon=True)
        with self._lock:
            if len(self._greeting) >= MAX_HANDSHAKES:
                oldest = next(iter(self._greeting))
                del self._greeting[oldest]
                oldest.end()
            self._greeting[pair] = None
            self._pairs[pair] = thread
        thread.start()

    # ------------------------------------------------------------ on the thread of a pair

    def _serve(self, pair: _Pair) -> None:
        try:
            pair.bell.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair.bell.settimeout(HANDSHAKE_S)
            while self._answer(pair):
                pair.bell.settimeout(None)  # its importer may have nothing to ask for a while
        except (OSError, EOFError, RuntimeError) as error:
            log.debug("a pair of %s has ended: %r", self.name, error)
        finally:
            pair.end()
            pair.bell.close()
            with self._lock:  # last: `close` must not return while a group is taken down
                self._greeting.pop(pair, None)
                self._pairs.pop(pair, None)

    def _answer(self, pair: _Pair) -> bool:
        """One transfer; False ends the pair. Who hangs up without a word is no stranger: an
        importer does so to learn whether it can be reached."""
        first = pair.group is None
        try:
            frame = pair.bell.recv(ASK.size)
            if not frame:
                return False
            frame += receive(pair.bell, ASK.size - len(frame))
            claim = self._claim_of(frame, pair)
        except (OSError, EOFError):
            claim = None
        if claim is None:
            self._num_strangers += first
            return False
        try:
            pair.bell.settimeout(STALL_S)
            self._send(pair, claim)
        finally:
            with self._lock:
                claim.pair = None
        pair.bell.sendall(DONE)
        return True

    def _claim_of(self, frame: bytes, pair: _Pair) -> _Claim | None:
        """The claim that the ask opens, which from here on is being sent by ``pair``."""
        magic, lease_id, secret = ASK.unpack(frame)
        with self._lock:
            claim = self._claims.get(lease_id)
            expected = claim.secret if claim is not None else bytes(SECRET_BYTES)
            proved = hmac.compare_digest(expected, secret)
            if claim is None or claim.pair is not None or not proved or magic != MAGIC:
                return None
            claim.pair = pair
            self._greeting.pop(pair, None)
            return claim

    def _send(self, pair: _Pair, claim: _Claim) -> None:
        block_bytes = self._pool.layout.block_bytes
        if pair.group is None:
            name = secrets.token_bytes(GROUP_NAME_BYTES)
            store, port = serve_store(self._host)
            answer = Answer(len(claim.blocks), block_bytes, port, name)
            pair.bell.sendall(answer.pack())
            pair.group = self._backend.make_group(named(store, name), EXPORTER)
        else:
            answer = Answer(len(claim.blocks), block_bytes, 0, bytes(GROUP_NAME_BYTES))
            pair.bell.sendall(answer.pack())
        raw, size = self._pool.raw, pair.group.rows_at_once
        for start in range(0, len(claim.blocks), size):
            if claim.revoked:
                raise RuntimeError("the lease has ended")
            some = claim.blocks[start : start + size]
            pair.group.send([raw[block.block_id] for block in some])


class GlooExporter(DistExporter):
    name = GLOO


class NcclExporter(DistExporter):
    name = NCCL
