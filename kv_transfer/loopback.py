"""Hand-off inside one process: for tests, the simulation and one-process runs."""

from collections.abc import Mapping, Sequence

from common.errors import PeerLost
from common.types import BlockRef, Epoch, WorkerId
from kv_transfer.base import (
    BlockCopy,
    CancelFlag,
    FetchResult,
    HostIdentity,
    KVExporter,
    KVImporter,
    LeaseProof,
    LoopbackAddress,
    Peer,
    TransportSettings,
)
from kv_transfer.checksum import hasher
from kv_transfer.copying import copy_rows, seal_rows
from kv_transfer.exports import Exports
from kv_transfer.layout import require_compatible
from kv_transfer.lease import LeaseKey, LeaseVerdict
from kv_transfer.memory import PoolMemory

NAME = "loopback"


class LoopbackExporter(KVExporter):
    name = NAME

    def __init__(self, pool: PoolMemory, settings: TransportSettings) -> None:
        self._pool = pool
        self._hash = hasher(pool.layout.checksum)
        self._hub = settings.loopback_hub
        self._hub[pool.worker_id, pool.epoch] = pool.rows

    def address(self) -> LoopbackAddress:
        return LoopbackAddress(self._pool.worker_id, self._pool.epoch)

    def seal(self, blocks: Sequence[BlockRef]) -> tuple[int, ...]:
        return seal_rows(self._pool.rows, blocks, self._hash)

    def send(self, proof: LeaseProof, blocks: Sequence[BlockRef]) -> None: ...

    def revoke(self, lease_id: str) -> None: ...

    def close(self) -> None:
        self._hub.pop((self._pool.worker_id, self._pool.epoch), None)


class LoopbackImporter(KVImporter):
    name = NAME

    def __init__(self, pool: PoolMemory, settings: TransportSettings) -> None:
        self._pool = pool
        self._hash = hasher(pool.layout.checksum)
        self._hub = settings.loopback_hub

    def connect(self, peer: Peer) -> None:
        require_compatible(self._pool.layout, peer.layout)
        if (peer.worker_id, peer.epoch) not in self._hub:
            raise PeerLost(f"no pool of {peer.worker_id} in this process")

    def fetch(
        self, peer: Peer, proof: LeaseProof, copies: Sequence[BlockCopy], cancel: CancelFlag
    ) -> FetchResult:
        self.connect(peer)
        source = self._hub[peer.worker_id, peer.epoch]
        return copy_rows(source, self._pool.rows, copies, self._hash, cancel, NAME)

    def forget(self, worker_id: WorkerId, epoch: Epoch) -> None: ...

    def close(self) -> None: ...


class LoopbackControl:
    """A `KVControl` over the exports of the same process, by endpoint: no network, no delay."""

    def __init__(
        self, exports: Mapping[str, Exports], claimer_id: WorkerId, host: HostIdentity
    ) -> None:
        self._exports = exports
        self._claimer_id = claimer_id
        self._host = host

    async def hello(self, endpoint: str) -> tuple[Peer, HostIdentity]:
        return self._at(endpoint).describe(), self._host

    async def claim(
        self, endpoint: str, key: LeaseKey, block_indices: Sequence[int], transport: str
    ) -> LeaseVerdict:
        return self._at(endpoint).claim(key, self._claimer_id, block_indices, transport)

    async def renew(self, endpoint: str, keys: Sequence[LeaseKey]) -> tuple[LeaseVerdict, ...]:
        return self._at(endpoint).renew(keys)

    async def settle(self, endpoint: str, key: LeaseKey) -> LeaseVerdict:
        return self._at(endpoint).settle(key)

    async def release(self, endpoint: str, key: LeaseKey) -> LeaseVerdict:
        return self._at(endpoint).release(key)

    async def forget(self, endpoint: str) -> None: ...

    def _at(self, endpoint: str) -> Exports:
        if endpoint not in self._exports:
            raise PeerLost(f"nobody answers at {endpoint}")
        return self._exports[endpoint]
