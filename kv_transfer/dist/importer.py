"""Rings the bells of peers and receives what they send into the local pool."""

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.errors import ConfigError, PeerLost
from common.failpoints import DROP, hit
from common.types import Epoch, WorkerId
from kv_transfer.base import (
    BlockCopy,
    CancelFlag,
    DistAddress,
    FetchResult,
    KVImporter,
    LeaseProof,
    Peer,
    TransportSettings,
)
from kv_transfer.copying import check_row, go_on
from kv_transfer.dist.backend import GLOO, NCCL, Backend, require_trusted
from kv_transfer.dist.bell import ANSWER, ASK, DONE, MAGIC, STALL_S, Answer, hang_up, receive
from kv_transfer.dist.group import IMPORTER, PairGroup, join_store, losing_peer, named
from kv_transfer.layout import require_compatible
from kv_transfer.memory import PoolMemory


@dataclass(slots=True)
class _Pair:
    bell: socket.socket
    group: PairGroup | None = None

    def close(self) -> None:
        if self.group is not None:
            self.group.abort()
        hang_up(self.bell)
        self.bell.close()


class DistImporter(KVImporter):
    """One pair a peer, kept from one fetch to the next as long as all goes well."""

    def __init__(self, pool: PoolMemory, settings: TransportSettings) -> None:
        self._pool = pool
        self._backend = Backend(self.name, pool, settings)
        self._insecure = settings.insecure
        self._addresses: dict[tuple[WorkerId, Epoch], DistAddress] = {}
        self._pairs: dict[tuple[WorkerId, Epoch], _Pair] = {}

    def connect(self, peer: Peer) -> None:
        require_compatible(self._pool.layout, peer.layout)
        if (peer.worker_id, peer.epoch) in self._addresses:
            return
        address = self._address(peer)
        try:
            _dial(address).close()
        except OSError:
            raise PeerLost(f"{self.name} of {peer.worker_id} cannot be reached") from None
        self._addresses[peer.worker_id, peer.epoch] = address

    def fetch(
        self, peer: Peer, proof: LeaseProof, copies: Sequence[BlockCopy], cancel: CancelFlag
    ) -> FetchResult:
        start_s = time.monotonic()
        self.connect(peer)
        name = (peer.worker_id, peer.epoch)
        pair, answer = self._ask(name, proof)
        try:
            if (answer.num_blocks, answer.block_bytes) != (
                len(copies),
                self._pool.layout.block_bytes,
            ):
                raise PeerLost("an exporter serves another claim than ours")
            self._receive(pair, answer, self._addresses[name], copies, cancel)
        except BaseException:
            pair.close()
            raise
        self._pairs[name] = pair
        return FetchResult(
            num_blocks=len(copies),
            num_bytes=len(copies) * self._pool.layout.block_bytes,
            duration_s=time.monotonic() - start_s,
            transport=self.name,
        )

    def forget(self, worker_id: WorkerId, epoch: Epoch) -> None:
        self._addresses.pop((worker_id, epoch), None)
        pair = self._pairs.pop((worker_id, epoch), None)
        if pair is not None:
            pair.close()

    def close(self) -> None:
        for worker_id, epoch in list(self._pairs):
            self.forget(worker_id, epoch)

    # ------------------------------------------------------------ inside

    def _address(self, peer: Peer) -> DistAddress:
        for address in peer.addresses:
            if isinstance(address, DistAddress) and address.transport == self.name:
                break
        else:
            raise PeerLost(f"{peer.worker_id} does not offer {self.name}")
        if self.name == NCCL and address.device_uuid == self._backend.device_uuid:
            raise PeerLost(
                f"both pools are on GPU {address.device_uuid}: NCCL does not take two ranks on one "
                "GPU; use cuda_ipc"
            )
        try:
            require_trusted(address.host, self._insecure, self.name)
        except ConfigError as error:
            raise PeerLost(error.message) from None
        return address

    def _ask(self, name: tuple[WorkerId, Epoch], proof: LeaseProof) -> tuple[_Pair, Answer]:
        """The pair that stood idle, or a new one where there is none or it has ended meanwhile."""
        ask = ASK.pack(MAGIC, bytes.fromhex(proof.lease_id), proof.secret)
        pair = self._pairs.pop(name, None)
        if pair is not None:
            with contextlib.suppress(OSError, EOFError):
                return pair, _answer(pair, ask)
            pair.close()
        with losing_peer("an exporter does not answer"):
            pair = _Pair(_dial(self._addresses[name]))
            try:
                return pair, _answer(pair, ask)
            except BaseException:
                pair.close()
                raise

    def _receive(
        self,
        pair: _Pair,
        answer: Answer,
        address: DistAddress,
        copies: Sequence[BlockCopy],
        cancel: CancelFlag,
    ) -> None:
        with losing_peer("an exporter did not join the group"):
            if pair.group is None:
                store = join_store(address.host, answer.store_port)
                pair.group = self._backend.make_group(named(store, answer.group_name), IMPORTER)
        for start in range(0, len(copies), pair.group.rows_at_once):
            some = copies[start : start + pair.group.rows_at_once]
            rows = [self._target(copy, cancel) for copy in some]
            with losing_peer("an exporter stopped sending"):
                pair.group.receive(rows)
            if self._backend.hash is not None:
                for copy in some:
                    check_row(self._pool.rows[copy.target.block_id], copy, self._backend.hash)
        with losing_peer("an exporter did not finish sending"):
            if receive(pair.bell, len(DONE)) != DONE:
                raise EOFError

    def _target(self, copy: BlockCopy, cancel: CancelFlag) -> torch.Tensor:
        """Where the block goes, uint8 ``[block_bytes]``."""
        go_on(cancel)
        row = self._pool.raw[copy.target.block_id]
        return torch.empty_like(row) if hit("decode.copy_block") == DROP else row


def _dial(address: DistAddress) -> socket.socket:
    """Raises OSError."""
    bell = socket.create_connection((address.host, address.port), STALL_S)
    bell.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bell


def _answer(pair: _Pair, ask: bytes) -> Answer:
    """Raises OSError or EOFError."""
    pair.bell.sendall(ask)
    return Answer(*ANSWER.unpack(receive(pair.bell, ANSWER.size)))


class GlooImporter(DistImporter):
    name = GLOO


class NcclImporter(DistImporter):
    name = NCCL
