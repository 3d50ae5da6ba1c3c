"""Two workers' ends of a hand-off in one process, over any backend, with the real glue between."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from common import failpoints
from common.errors import LeaseRefused, PeerLost
from common.types import BlockMove, BlockRef, KVLayout, Offer
from kv_transfer.base import HostIdentity, TransportSettings
from kv_transfer.exports import Exports
from kv_transfer.imports import Imports
from kv_transfer.layout import NO_CHECKSUM
from kv_transfer.lease import LeaseEnd, LeaseKey, LeaseVerdict
from kv_transfer.loopback import LoopbackControl
from kv_transfer.memory import PoolMemory, allocate_pool
from kv_transfer.registry import make_exporters, make_importers, pool_kind
from kv_transfer.transfers import TransferThread
from tests.kv_transfer.fake_device import FakeDevice

LAYOUT = KVLayout(
    num_layers=2, block_size=4, num_kv_heads=2, head_size=8, dtype="float32", model_fingerprint="f"
)
NUM_BLOCKS = 24
POISON = 0xA5
HOST = HostIdentity("boot", "here")
ENDPOINT = "exporter:1"
WAIT_S = 5.0


@dataclass
class Rig:
    """``exporter`` pool is random bytes, ``importer`` pool is poison."""

    backend: str
    exporter_pool: PoolMemory
    importer_pool: PoolMemory
    exports: Exports
    imports: Imports
    endpoints: dict[str, Exports]
    settings: TransportSettings
    transfers: TransferThread
    devices: tuple[FakeDevice, FakeDevice] | tuple[None, None]
    ends: list[LeaseEnd] = field(default_factory=list)

    @property
    def checked(self) -> bool:
        """Whether blocks carry checksums."""
        return self.exporter_pool.layout.checksum != NO_CHECKSUM

    async def offer(self, block_ids: Sequence[int], attempt: int = 1) -> Offer:
        blocks = [BlockRef(block_id, generation=7) for block_id in block_ids]
        num_tokens = len(blocks) * LAYOUT.block_size
        return await self.exports.offer(blocks, num_tokens, attempt, self.ends.append)

    def require_untouched(self, except_ids: Sequence[int] = ()) -> None:
        others = [i for i in range(NUM_BLOCKS) if i not in except_ids]
        assert (self.importer_pool.rows[others] == POISON).all(), "a block nobody asked for changed"

    async def require_refused(self, offer: Offer, verdict: LeaseVerdict) -> None:
        with pytest.raises(LeaseRefused) as caught:
            await self.imports.fetch(offer, moves({0: 2}))
        assert caught.value.verdict == verdict
        self.require_untouched()

    async def require_no_lease(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.exports.wait_none()


def moves(pairs: dict[int, int]) -> list[BlockMove]:
    """From indices into the offer to local block ids."""
    return [BlockMove(index, BlockRef(target, generation=3)) for index, target in pairs.items()]


@asynccontextmanager
async def open_rig(
    backend: str,
    folder: Path,
    lease_s: float = 5.0,
    importer_layout: KVLayout = LAYOUT,
    epoch: int = 11,
) -> AsyncIterator[Rig]:
    settings = TransportSettings(pool_dir=folder)
    kind = pool_kind(backend)
    devices = make_devices(backend, folder)
    exporter_layout = LAYOUT
    if kind == "cuda":
        exporter_layout = replace(LAYOUT, checksum=NO_CHECKSUM)
        importer_layout = replace(importer_layout, checksum=NO_CHECKSUM)
    transfers = TransferThread()
    with (
        allocate_pool(kind, exporter_layout, NUM_BLOCKS, folder, "p-1", epoch, devices[0]) as ours,
        allocate_pool(kind, importer_layout, NUM_BLOCKS, folder, "d-1", 12, devices[1]) as theirs,
    ):
        rng = np.random.default_rng(0)
        ours.rows[:] = rng.integers(0, 256, ours.rows.shape, dtype=np.uint8)
        theirs.rows[:] = POISON
        exporters = make_exporters(backend, ours, settings)
        exports = Exports(ours, exporters, transfers, ENDPOINT, lease_s)
        endpoints = {ENDPOINT: exports}
        imports = make_imports(backend, theirs, settings, transfers, endpoints)
        await exports.start()
        await imports.start()
        rig = Rig(backend, ours, theirs, exports, imports, endpoints, settings, transfers, devices)
        try:
            yield rig
        finally:
            await imports.close()
            await exports.close()
            transfers.close()
        for device in devices:
            if device is not None:
                device.require_closed()


@asynccontextmanager
async def second_importer(rig: Rig) -> AsyncIterator[tuple[Imports, PoolMemory]]:
    """Another worker that fetches from the rig's exporter, with a pool of its own."""
    pool, (_, device) = rig.importer_pool, make_devices(rig.backend, rig.settings.pool_dir)
    kind, folder = pool_kind(rig.backend), rig.settings.pool_dir
    with allocate_pool(kind, pool.layout, NUM_BLOCKS, folder, "d-2", 13, device) as other:
        imports = make_imports(rig.backend, other, rig.settings, rig.transfers, rig.endpoints)
        try:
            yield imports, other
        finally:
            await imports.close()


def make_devices(backend: str, folder: Path) -> tuple[FakeDevice, FakeDevice] | tuple[None, None]:
    """Exporter's and importer's: one GPU under two processes for cuda_ipc, two for nccl."""
    if pool_kind(backend) != "cuda":
        return None, None
    other = "GPU-b" if backend == "nccl" else "GPU-a"
    return FakeDevice("GPU-a", folder), FakeDevice(other, folder)


def make_imports(
    backend: str,
    pool: PoolMemory,
    settings: TransportSettings,
    transfers: TransferThread,
    endpoints: dict[str, Exports],
) -> Imports:
    importers = make_importers(backend, pool, settings)
    control = LoopbackControl(endpoints, pool.worker_id, HOST)
    return Imports(pool, importers, transfers, control, HOST)


def altered(offer: Offer, block: int, block_id: int) -> Offer:
    """The offer with one of its blocks naming another."""
    blocks = list(offer.blocks)
    blocks[block] = BlockRef(block_id, blocks[block].generation)
    return replace(offer, blocks=tuple(blocks))


async def reached(failpoint: str) -> None:
    """Returns once the armed failpoint has acted."""
    async with asyncio.timeout(WAIT_S):
        while not failpoints._armed[failpoint].num_hits:
            await asyncio.sleep(0.001)


def cut_renewals(rig: Rig) -> None:
    """No renewal of the importer arrives any more; all else does."""
    rig.imports._renewer._control = _Cut()


class _Cut:
    async def renew(self, endpoint: str, keys: Sequence[LeaseKey]) -> tuple[LeaseVerdict, ...]:
        raise PeerLost("the renewal was lost")
