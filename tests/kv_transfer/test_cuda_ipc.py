"""CUDA IPC over a device that tests bring: conformance, order, epochs, and what must be refused."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common import failpoints
from common.errors import ConfigError, LayoutMismatch, PeerLost
from kv_transfer.base import CudaIpcAddress, Peer, TransportSettings
from kv_transfer.cuda.device import open_device
from kv_transfer.cuda.ipc import CudaIpcExporter, CudaIpcImporter
from kv_transfer.layout import NO_CHECKSUM
from kv_transfer.memory import PoolMemory, allocate_pool
from tests.kv_transfer.conformance import (
    CHECKS,
    Check,
    a_restarted_worker_is_another,
    bytes_arrive_and_nothing_else_changes,
    many_fetches_at_once,
)
from tests.kv_transfer.fake_device import FakeDevice
from tests.kv_transfer.rig import LAYOUT, moves, open_rig

ON_GPU = replace(LAYOUT, checksum=NO_CHECKSUM)
SETTINGS = TransportSettings()


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: Check, tmp_path: Path) -> None:
    await check("cuda_ipc", tmp_path)


async def test_one_opening_an_epoch_and_one_launch_a_claim(tmp_path: Path) -> None:
    async with open_rig("cuda_ipc", tmp_path) as rig:
        for blocks in ([5, 3, 9], [1, 2]):
            offer = await rig.offer(blocks)
            await rig.imports.fetch(offer, moves({i: i + 2 for i in range(len(blocks))}))
    exporter, importer = rig.devices
    assert exporter is not None and importer is not None
    assert exporter.log == ["synchronize", "synchronize"], "once before each offer"
    warm_up, *rest = importer.log
    assert warm_up == "copy 1"
    assert rest == ["open", "copy 3", "copy 2", "close"]


def unordered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaIpcExporter, "seal", lambda self, blocks: ())


def never_closed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaIpcImporter, "forget", lambda self, worker_id, epoch: None)


def opened_each_time(patch: pytest.MonkeyPatch) -> None:
    def connect(self: CudaIpcImporter, peer: Peer) -> None:
        self._sources[peer.worker_id, peer.epoch] = self._open(peer)

    patch.setattr(CudaIpcImporter, "connect", connect)


def closed_too_early(patch: pytest.MonkeyPatch) -> None:
    connect = CudaIpcImporter.connect

    def broken(self: CudaIpcImporter, peer: Peer) -> None:
        connect(self, peer)
        self._device.close(self._sources[peer.worker_id, peer.epoch])

    patch.setattr(CudaIpcImporter, "connect", broken)


@pytest.mark.parametrize(
    ("sabotage", "check"),
    [
        (unordered, bytes_arrive_and_nothing_else_changes),
        (never_closed, bytes_arrive_and_nothing_else_changes),
        (opened_each_time, many_fetches_at_once),
        (closed_too_early, bytes_arrive_and_nothing_else_changes),
        (never_closed, a_restarted_worker_is_another),
    ],
    ids=lambda function: function.__name__,
)
async def test_a_check_sees_its_guard_missing(
    sabotage: Callable[[pytest.MonkeyPatch], None],
    check: Check,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sabotage(monkeypatch)
    with pytest.raises(AssertionError):
        await check("cuda_ipc", tmp_path)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PoolMemory]:
    """The importer's; its GPU cannot read one called GPU-far."""
    device = FakeDevice("GPU-a", tmp_path, unreachable=["GPU-far"])
    with allocate_pool("cuda", ON_GPU, 8, tmp_path, "d-1", 1, device) as pool:
        yield pool
    device.require_closed()


def test_a_stale_handle_is_a_lost_peer(pool: PoolMemory, tmp_path: Path) -> None:
    """The worker whose memory it opened has gone, or never was."""
    importer = CudaIpcImporter(pool, SETTINGS)
    device = FakeDevice("GPU-a", tmp_path)
    with allocate_pool("cuda", ON_GPU, 8, tmp_path, "p-1", 1, device) as theirs:
        address = CudaIpcExporter(theirs, SETTINGS).address()
    for handle in (address.handle, bytes(64), b""):
        peer = Peer("p-1", 1, ON_GPU, 8, (replace(address, handle=handle),))
        with pytest.raises(PeerLost, match="opens nothing"):
            importer.connect(peer)
    importer.close()


def test_a_gpu_that_ours_cannot_read_is_named(pool: PoolMemory) -> None:
    importer = CudaIpcImporter(pool, SETTINGS)
    with pytest.raises(PeerLost, match="GPU-a cannot read GPU GPU-far"):
        importer.connect(Peer("p-1", 1, ON_GPU, 8, (CudaIpcAddress("GPU-far", bytes(64)),)))
    importer.close()


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "float16"), ("block_size", 8), ("order", "layer_major")]
)
def test_another_layout_is_refused_before_anything_is_opened(
    field: str, value: str | int, pool: PoolMemory
) -> None:
    importer = CudaIpcImporter(pool, SETTINGS)
    other = replace(ON_GPU, **{field: value})
    with pytest.raises(LayoutMismatch) as caught:
        importer.connect(Peer("p-1", 1, other, 8, (CudaIpcAddress("GPU-a", bytes(64)),)))
    assert caught.value.field == field
    importer.close()


def test_the_handle_is_in_no_log() -> None:
    assert "secret" not in repr(CudaIpcAddress("GPU-a", b"secret"))


def test_a_pool_in_host_memory_and_a_layout_with_checksums_are_refused(tmp_path: Path) -> None:
    with allocate_pool("plain", ON_GPU, 8, tmp_path, "p-1", 1) as on_host:
        for make in (CudaIpcExporter, CudaIpcImporter):
            with pytest.raises(ConfigError, match="on a GPU"):
                make(on_host, SETTINGS)
    device = FakeDevice("GPU-a", tmp_path)
    with allocate_pool("cuda", LAYOUT, 8, tmp_path, "p-1", 1, device) as checked:
        for make in (CudaIpcExporter, CudaIpcImporter):
            with pytest.raises(ConfigError, match="checksums"):
                make(checked, SETTINGS)


@pytest.mark.parametrize(
    ("name", "reason"), [("cpu", "must lie on a GPU"), ("cuda", "no GPU that it can use")]
)
def test_without_a_gpu_the_device_is_refused(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=reason):
        open_device(name)
