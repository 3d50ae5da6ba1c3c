"""What a reader of a pool file must see before it maps it."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.errors import ChecksumMismatch, ConfigError, PeerLost
from common.types import BlockRef, KVLayout
from kv_transfer import copying
from kv_transfer.base import (
    BlockCopy,
    CancelFlag,
    HostIdentity,
    Peer,
    ShmAddress,
    TransportSettings,
)
from kv_transfer.checksum import hasher
from kv_transfer.copying import copy_rows
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
@pytest.mark.fault("V5")
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


def test_two_threads_copy_as_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every block once; a failure of either thread ends the fetch only when both have stopped."""
    monkeypatch.setattr(copying, "MIN_BLOCKS_TO_SPLIT", 2)
    source = np.random.default_rng(0).integers(0, 256, (64, 4096), dtype=np.uint8)
    target = np.zeros_like(source)
    hash_bytes = hasher("xxh3_64")
    assert hash_bytes is not None
    copies = [
        BlockCopy(i, BlockRef(i, 1), BlockRef(63 - i, 1), hash_bytes(source[i].data))
        for i in range(64)
    ]
    with ThreadPoolExecutor(1) as helper:
        for _ in range(20):
            target[:] = 0
            copy_rows(source, target, copies, hash_bytes, CancelFlag(), "shm", helper)
            assert (target[::-1] == source).all()
        for index in (0, 31, 63):
            bad = [replace(c, checksum=0) if c.index == index else c for c in copies]
            with pytest.raises(ChecksumMismatch) as caught:
                copy_rows(source, target, bad, hash_bytes, CancelFlag(), "shm", helper)
            assert caught.value.index == index
            before = target.copy()
            time.sleep(0.01)
            assert (target == before).all()
