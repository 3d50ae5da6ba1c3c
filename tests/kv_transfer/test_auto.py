"""Which transport `auto` takes between two workers, by what both can prove, and what it says."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError, PeerLost
from kv_transfer.base import KVImporter, Peer, TransportSettings
from kv_transfer.layout import NO_CHECKSUM
from kv_transfer.memory import PoolMemory, allocate_pool
from kv_transfer.registry import (
    choose,
    make_exporters,
    make_importers,
    pool_kind,
    transport_names,
)
from tests.kv_transfer.fake_device import FakeDevice
from tests.kv_transfer.rig import LAYOUT, moves, open_rig

ON_GPU = replace(LAYOUT, checksum=NO_CHECKSUM)


@pytest.fixture(autouse=True)
def _no_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without the extra; it would take what shares no memory."""
    monkeypatch.setattr("kv_transfer.nixl._PACKAGES", {})


def settings(folder: Path) -> TransportSettings:
    return TransportSettings(pool_dir=folder)


@contextmanager
def exporting(pool: PoolMemory, folder: Path) -> Iterator[Peer]:
    exporters = make_exporters("auto", pool, settings(folder))
    addresses = tuple(exporter.address() for exporter in exporters.values())
    yield Peer(pool.worker_id, pool.epoch, pool.layout, pool.num_blocks, addresses)
    for exporter in exporters.values():
        exporter.close()


@contextmanager
def importing(pool: PoolMemory, folder: Path) -> Iterator[dict[str, KVImporter]]:
    importers = make_importers("auto", pool, settings(folder))
    yield importers
    for importer in importers.values():
        importer.close()


@contextmanager
def on_gpus(
    ours: FakeDevice, theirs: FakeDevice, folder: Path
) -> Iterator[tuple[dict[str, KVImporter], Peer]]:
    with ExitStack() as stack:
        enter = stack.enter_context
        here = enter(allocate_pool("cuda", ON_GPU, 8, folder, "d-1", 1, ours))
        there = enter(allocate_pool("cuda", ON_GPU, 8, folder, "p-1", 1, theirs))
        peer = enter(exporting(there, folder))
        yield enter(importing(here, folder)), peer


def test_one_gpu_under_two_processes(tmp_path: Path) -> None:
    ours, theirs = FakeDevice("GPU-a", tmp_path), FakeDevice("GPU-a", tmp_path)
    with on_gpus(ours, theirs, tmp_path) as (importers, peer):
        assert choose(importers, peer, same_host=True).transport == "cuda_ipc"
        with pytest.raises(PeerLost, match="cuda_ipc: another host; nccl: both pools are on GPU"):
            choose(importers, peer, same_host=False)
    ours.require_closed()


def test_two_gpus_with_and_without_access(tmp_path: Path) -> None:
    ours, theirs = FakeDevice("GPU-a", tmp_path), FakeDevice("GPU-b", tmp_path)
    with on_gpus(ours, theirs, tmp_path) as (importers, peer):
        choice = choose(importers, peer, same_host=True)
        assert (choice.transport, choice.reason) == ("cuda_ipc", "cuda_ipc: reached")
        choice = choose(importers, peer, same_host=False)
        assert choice.reason == "cuda_ipc: another host; nccl: reached"
    apart = FakeDevice("GPU-a", tmp_path, unreachable=["GPU-b"])
    with on_gpus(apart, FakeDevice("GPU-b", tmp_path), tmp_path) as (importers, peer):
        choice = choose(importers, peer, same_host=True)
        assert choice.transport == "nccl"
        assert choice.reason == ("cuda_ipc: GPU GPU-a cannot read GPU GPU-b of p-1; nccl: reached")


def test_a_pool_on_a_gpu_and_one_in_host_memory_are_not_paired(tmp_path: Path) -> None:
    device = FakeDevice("GPU-a", tmp_path)
    with (
        allocate_pool("cuda", ON_GPU, 8, tmp_path, "d-1", 1, device) as here,
        allocate_pool("shm", LAYOUT, 8, tmp_path, "p-1", 1) as there,
        exporting(there, tmp_path) as peer,
        importing(here, tmp_path) as importers,
        pytest.raises(PeerLost, match="cuda_ipc: not offered by p-1; nccl: not offered by p-1"),
    ):
        choose(importers, peer, same_host=True)


async def test_the_reason_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_rig("auto", tmp_path) as rig:
        assert rig.imports.reason("p-1") == ""
        with caplog.at_level("INFO", logger="kv_transfer.links"):
            await rig.imports.fetch(await rig.offer([1]), moves({0: 2}))
        assert rig.imports.reason("p-1") == "shm: reached"
        assert "KV of p-1 comes by shm: shm: reached" in caplog.text


def test_what_auto_stands_for() -> None:
    assert transport_names("auto") == ("shm", "tcp")
    assert transport_names("auto", on_device=True) == ("cuda_ipc", "nixl", "nccl")
    assert pool_kind("auto") == "shm" and pool_kind("auto", "cuda") == "cuda"
    assert pool_kind("cuda_ipc") == pool_kind("nccl") == "cuda"
    assert pool_kind("gloo") == pool_kind("nixl") == "plain"


def test_nixl_without_the_extra_is_refused_by_what_to_install(tmp_path: Path) -> None:
    with (
        allocate_pool("plain", LAYOUT, 8, tmp_path, "p-1", 1) as pool,
        pytest.raises(ConfigError, match=r"baton-serve\[nixl\]"),
    ):
        make_exporters("nixl", pool, settings(tmp_path))
