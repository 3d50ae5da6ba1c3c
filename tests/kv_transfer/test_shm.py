"""What a reader of a pool file must see before it maps it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ConfigError, PeerLost
from common.types import KVLayout
from kv_transfer.base import HostIdentity, Peer, ShmAddress, TransportSettings
from kv_transfer.layout import NO_CHECKSUM
from kv_transfer.memory import PoolMemory, allocate_pool
from kv_transfer.registry import choose, make_exporters, make_importers, pool_kind
from kv_transfer.shm import ShmExporter, ShmImporter
from tests.kv_transfer.rig import LAYOUT

PEER = Peer("p-1", 5, LAYOUT, 8, (ShmAddress("p-1", 5, 8 * LAYOUT.block_bytes),))


@pytest.fixture
def target(tmp_path: Path) -> PoolMemory:
    return allocate_pool("plain", LAYOUT, 8, tmp_path, "d-1", 1)


def chmod(path: Path) -> None:
    path.chmod(0o644)


def grow(path: Path) -> None:
    os.truncate(path, 9 * LAYOUT.block_bytes)


def link(path: Path) -> None:
    moved = path.rename(path.with_name("elsewhere"))
    path.symlink_to(moved)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)
    # Keeps an opening reader from waiting for a writer.
    os.open(path, os.O_RDWR)


def chown(path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, to give a file away")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize("spoil", [chmod, grow, link, chown, fifo])
def test_a_file_that_is_not_as_it_should_be_is_not_mapped(
    spoil: Callable[[Path], None], target: PoolMemory, tmp_path: Path
) -> None:
    importer = ShmImporter(target, TransportSettings(pool_dir=tmp_path))
    with allocate_pool("shm", LAYOUT, 8, tmp_path, "p-1", 5) as pool:
        assert pool.path is not None
        spoil(pool.path)
        with pytest.raises(PeerLost) as caught:
            importer.connect(PEER)
        assert str(tmp_path) not in caught.value.message
    importer.close()


def test_the_mapping_is_read_only(target: PoolMemory, tmp_path: Path) -> None:
    importer = ShmImporter(target, TransportSettings(pool_dir=tmp_path))
    with allocate_pool("shm", LAYOUT, 8, tmp_path, "p-1", 5):
        importer.connect(PEER)
        (source,) = importer._sources.values()
        with pytest.raises(ValueError, match="read-only"):
            source[0, 0] = 1
    importer.forget("p-1", 5)
    assert not importer._sources
    importer.close()


def test_without_checksums_it_does_not_start(tmp_path: Path) -> None:
    layout = KVLayout(2, 4, 2, 8, "float32", "f", checksum=NO_CHECKSUM)
    with allocate_pool("shm", layout, 8, tmp_path, "p-1", 1) as pool:
        for make in (ShmExporter, ShmImporter):
            with pytest.raises(ConfigError, match="checksum"):
                make(pool, TransportSettings(pool_dir=tmp_path))


def test_an_exporter_needs_a_shared_pool(target: PoolMemory) -> None:
    with pytest.raises(ConfigError, match="shared pool"):
        ShmExporter(target, TransportSettings())


def test_an_unknown_transport_is_refused_with_what_is_known(target: PoolMemory) -> None:
    with pytest.raises(ConfigError, match="loopback, shm"):
        make_exporters("carrier-pigeon", target, TransportSettings())


def test_auto_needs_one_kernel_and_a_pool_in_sight(target: PoolMemory, tmp_path: Path) -> None:
    importers = make_importers("auto", target, TransportSettings(pool_dir=tmp_path))
    assert pool_kind("auto") == "shm"
    with pytest.raises(PeerLost, match="not in this worker's folder"):
        choose(importers, PEER, same_host=True)
    with allocate_pool("shm", LAYOUT, 8, tmp_path, "p-1", 5):
        choice = choose(importers, PEER, same_host=True)
        assert (choice.transport, choice.reason) == ("shm", "shm: reached")
        with pytest.raises(PeerLost, match="another host"):
            choose(importers, PEER, same_host=False)
    for importer in importers.values():
        importer.close()


def test_hosts_without_a_boot_id_share_nothing() -> None:
    assert HostIdentity("a", "x").shares_memory_with(HostIdentity("a", "y"))
    assert not HostIdentity("a", "x").shares_memory_with(HostIdentity("b", "x"))
    assert not HostIdentity("", "x").shares_memory_with(HostIdentity("", "x"))
