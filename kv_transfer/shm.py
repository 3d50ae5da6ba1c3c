"""Hand-off through shared memory: the importer maps the exporter's pool file and copies from it.

The reader trusts no path that a peer sends. It builds the name in its own folder, follows no link,
checks owner, mode and size, and maps read-only, so that it can harm nobody's pool.
"""

import mmap
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from common.errors import ConfigError, PeerLost
from common.types import BlockRef, Epoch, WorkerId
from kv_transfer.base import (
    BlockCopy,
    CancelFlag,
    FetchResult,
    KVExporter,
    KVImporter,
    LeaseProof,
    Peer,
    ShmAddress,
    TransportSettings,
)
from kv_transfer.checksum import required_hasher
from kv_transfer.copying import Rows, copy_rows, seal_rows
from kv_transfer.layout import pool_bytes, require_compatible
from kv_transfer.memory import PoolMemory, pool_path

NAME = "shm"


class ShmExporter(KVExporter):
    name = NAME

    def __init__(self, pool: PoolMemory, settings: TransportSettings) -> None:
        if pool.path is None:
            raise ConfigError("transport", "shm needs a shared pool")
        self._pool = pool
        self._hash = required_hasher(pool.layout.checksum, NAME)

    def address(self) -> ShmAddress:
        return ShmAddress(self._pool.worker_id, self._pool.epoch, self._pool.rows.nbytes)

    def seal(self, blocks: Sequence[BlockRef]) -> tuple[int, ...]:
        return seal_rows(self._pool.rows, blocks, self._hash)

    def send(self, proof: LeaseProof, blocks: Sequence[BlockRef]) -> None: ...

    def revoke(self, lease_id: str) -> None: ...

    def close(self) -> None: ...


class ShmImporter(KVImporter):
    name = NAME

    def __init__(self, pool: PoolMemory, settings: TransportSettings) -> None:
        self._pool = pool
        self._pool_dir = settings.pool_dir
        self._hash = required_hasher(pool.layout.checksum, NAME)
        self._sources: dict[tuple[WorkerId, Epoch], Rows] = {}
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copy")

    def connect(self, peer: Peer) -> None:
        require_compatible(self._pool.layout, peer.layout)
        if (peer.worker_id, peer.epoch) not in self._sources:
            self._sources[peer.worker_id, peer.epoch] = self._map(peer)

    def fetch(
        self, peer: Peer, proof: LeaseProof, copies: Sequence[BlockCopy], cancel: CancelFlag
    ) -> FetchResult:
        self.connect(peer)
        source = self._sources[peer.worker_id, peer.epoch]
        return copy_rows(source, self._pool.rows, copies, self._hash, cancel, NAME, self._helper)

    def forget(self, worker_id: WorkerId, epoch: Epoch) -> None:
        self._sources.pop((worker_id, epoch), None)

    def close(self) -> None:
        self._helper.shutdown(wait=True)
        self._sources.clear()

    def _map(self, peer: Peer) -> Rows:
        """The peer's pool, ``[num_blocks, block_bytes]``, read-only."""
        size = pool_bytes(peer.layout, peer.num_blocks)
        try:
            path = pool_path(self._pool_dir, peer.worker_id, peer.epoch)
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except (ConfigError, OSError):
            raise PeerLost(f"the pool of {peer.worker_id} is not in this worker's folder") from None
        try:
            found = os.fstat(fd)
            private = stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600
            if not private or found.st_uid != os.geteuid() or found.st_size != size:
                raise PeerLost(f"the pool file of {peer.worker_id} is not what it should be")
            memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        return np.frombuffer(memory, dtype=np.uint8).reshape(peer.num_blocks, -1)
