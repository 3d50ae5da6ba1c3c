"""Hand-off by CUDA IPC: the importer maps the exporter's whole pool and copies from it.

The life of a mapping::

    1. export   once per worker and epoch: one handle for the whole pool. It travels in Hello's
                answer, as bytes, to whoever showed the run's token.
    2. open     once per peer and epoch, where this process sees the peer's device (by its UUID)
                and its own can read it
    3. copy     the exporter has waited for its device before the offer left (`seal`), so what was
                offered is in memory; all blocks of a claim are one launch, and its end is waited
                for before the lease is settled
    4. close    when the peer's epoch has ended, or nothing was fetched from it for a while

There are no checksums: hashing on the host would cost what the transport saves. What protects a
copy is the lease's verdict.
"""

import time
from collections.abc import Sequence

import torch

from common.errors import PeerLost
from common.failpoints import DROP, hit
from common.types import BlockRef, Epoch, WorkerId
from kv_transfer.base import (
    BlockCopy,
    CancelFlag,
    CudaIpcAddress,
    FetchResult,
    KVExporter,
    KVImporter,
    LeaseProof,
    Peer,
    TransportSettings,
)
from kv_transfer.copying import go_on
from kv_transfer.layout import require_compatible, require_in_pool
from kv_transfer.memory import PoolMemory, device_without_checksums

NAME = "cuda_ipc"


class CudaIpcExporter(KVExporter):
    name = NAME

    def __init__(self, pool: PoolMemory, settings: TransportSettings) -> None:
        self._device = device_without_checksums(pool, NAME)
        self._address = CudaIpcAddress(self._device.uuid, self._device.export(pool.raw))

    def address(self) -> CudaIpcAddress:
        return self._address

    def seal(self, blocks: Sequence[BlockRef]) -> tuple[int, ...]:
        self._device.synchronize()
        return ()

    def send(self, proof: LeaseProof, blocks: Sequence[BlockRef]) -> None: ...

    def revoke(self, lease_id: str) -> None: ...

    def close(self) -> None: ...


class CudaIpcImporter(KVImporter):
    name = NAME

    def __init__(self, pool: PoolMemory, settings: TransportSettings) -> None:
        self._pool = pool
        self._device = device_without_checksums(pool, NAME)
        self._sources: dict[tuple[WorkerId, Epoch], torch.Tensor] = {}
        # Compiles the kernel now, on the null block, and not while a lease runs.
        self._device.copy_blocks(pool.raw, pool.raw, [0], [0])

    def connect(self, peer: Peer) -> None:
        require_compatible(self._pool.layout, peer.layout)
        if (peer.worker_id, peer.epoch) not in self._sources:
            self._sources[peer.worker_id, peer.epoch] = self._open(peer)

    def fetch(
        self, peer: Peer, proof: LeaseProof, copies: Sequence[BlockCopy], cancel: CancelFlag
    ) -> FetchResult:
        start_s = time.monotonic()
        self.connect(peer)
        kept = []
        for copy in copies:
            require_in_pool(copy.source.block_id, peer.num_blocks)
            go_on(cancel)
            if hit("decode.copy_block") != DROP:
                kept.append(copy)
        go_on(cancel)
        self._device.copy_blocks(
            self._sources[peer.worker_id, peer.epoch],
            self._pool.raw,
            [copy.source.block_id for copy in kept],
            [copy.target.block_id for copy in kept],
        )
        go_on(cancel)
        return FetchResult(
            num_blocks=len(copies),
            num_bytes=len(copies) * self._pool.layout.block_bytes,
            duration_s=time.monotonic() - start_s,
            transport=NAME,
        )

    def forget(self, worker_id: WorkerId, epoch: Epoch) -> None:
        source = self._sources.pop((worker_id, epoch), None)
        if source is not None:
            self._device.close(source)

    def close(self) -> None:
        for worker_id, epoch in list(self._sources):
            self.forget(worker_id, epoch)

    def _open(self, peer: Peer) -> torch.Tensor:
        """The peer's pool, uint8 ``[num_blocks, block_bytes]``."""
        for address in peer.addresses:
            if isinstance(address, CudaIpcAddress):
                break
        else:
            raise PeerLost(f"{peer.worker_id} does not offer {NAME}")
        if not self._device.reaches(address.device_uuid):
            raise PeerLost(
                f"GPU {self._device.uuid} cannot read GPU {address.device_uuid} of {peer.worker_id}"
            )
        return self._device.open(
            address.device_uuid, address.handle, peer.num_blocks, peer.layout.block_bytes
        )
