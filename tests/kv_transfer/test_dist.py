"""torch.distributed beyond what every transport must do: who may ring, what becomes of a group,
which pools and networks are refused."""

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from common import failpoints
from common.errors import ConfigError, PeerLost, TransferError
from common.types import BlockRef
from kv_transfer.base import (
    BlockCopy,
    CancelFlag,
    DistAddress,
    LeaseProof,
    Peer,
    TransportSettings,
)
from kv_transfer.dist import GlooImporter, NcclImporter
from kv_transfer.dist.bell import ASK, MAGIC
from kv_transfer.dist.exporter import DistExporter
from kv_transfer.dist.importer import DistImporter
from kv_transfer.layout import NO_CHECKSUM
from kv_transfer.lease import LeaseKey, LeaseVerdict
from kv_transfer.memory import allocate_pool
from kv_transfer.registry import make_exporters
from tests.kv_transfer.fake_device import FakeDevice
from tests.kv_transfer.rig import LAYOUT, Rig, moves, open_rig
from tests.kv_transfer.stranger import Stranger

LAYOUT_ON_GPU = replace(LAYOUT, checksum=NO_CHECKSUM)


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


def exporter_of(rig: Rig) -> DistExporter:
    (exporter,) = rig.exports._exporters.values()
    assert isinstance(exporter, DistExporter)
    return exporter


def importer_of(rig: Rig) -> DistImporter:
    (importer,) = rig.imports._links._importers.values()
    assert isinstance(importer, DistImporter)
    return importer


async def test_a_pair_lives_from_one_transfer_to_the_next(tmp_path: Path) -> None:
    async with open_rig("gloo", tmp_path) as rig:
        for target in range(4):
            await rig.imports.fetch(await rig.offer([target + 1]), moves({0: target}))
            assert len(exporter_of(rig)._pairs) == 1
        assert (rig.importer_pool.rows[:4] == rig.exporter_pool.rows[1:5]).all()


async def test_a_pair_that_ended_while_idle_is_made_anew(tmp_path: Path) -> None:
    async with open_rig("gloo", tmp_path) as rig:
        await rig.imports.fetch(await rig.offer([1]), moves({0: 2}))
        (pair,) = exporter_of(rig)._pairs
        pair.end()
        await rig.imports.fetch(await rig.offer([3]), moves({0: 4}))
        assert (rig.importer_pool.rows[4] == rig.exporter_pool.rows[3]).all()
        assert rig.imports.statistics().num_failures == {}


async def test_after_trouble_the_next_transfer_works(tmp_path: Path) -> None:
    """A block that fails its check, and a copy that nobody wants any more, each end the pair."""
    async with open_rig("gloo", tmp_path) as rig:
        for trouble in ("transfer.corrupt_block=corrupt@1", "decode.copy_block=sleep:0.1"):
            offer = await rig.offer([1, 2, 3])
            failpoints.arm(trouble)
            fetching = asyncio.create_task(rig.imports.fetch(offer, moves({0: 5, 1: 6, 2: 7})))
            await asyncio.sleep(0.05)
            fetching.cancel()
            with contextlib.suppress(TransferError, asyncio.CancelledError):
                await fetching
            failpoints.arm("")
            assert importer_of(rig)._pairs == {}
            await rig.imports.fetch(await rig.offer([4]), moves({0: 8}))
            assert (rig.importer_pool.rows[8] == rig.exporter_pool.rows[4]).all()


async def test_strangers_get_nothing(tmp_path: Path) -> None:
    async with open_rig("gloo", tmp_path) as rig:
        offer = await rig.offer([1, 2])
        key = LeaseKey.of(offer)
        assert rig.exports.claim(key, "d-1", [0], "gloo") is LeaseVerdict.OK
        lease_id = bytes.fromhex(key.lease_id)
        told = [
            b"GET / HTTP/1.1\r\nHost: baton\r\nAccept: */*\r\n\r\n",
            ASK.pack(MAGIC, lease_id, bytes(16)),
            ASK.pack(b"BTKV", lease_id, key.secret),
            ASK.pack(MAGIC, bytes(16), key.secret),
        ]
        address = exporter_of(rig).address()
        for num_strangers, said in enumerate(told, start=1):
            assert await asyncio.to_thread(heard, address, said) == b""
            assert rig.exports.statistics().num_strangers == num_strangers
        assert rig.exports.settle(key) is LeaseVerdict.OK
        ended = ASK.pack(MAGIC, lease_id, key.secret)
        assert await asyncio.to_thread(heard, address, ended) == b"", "the lease has ended"


def heard(address: DistAddress, said: bytes) -> bytes:
    with closing(Stranger(address)) as stranger:
        stranger.say(said)
        stranger.end()
        return stranger.hear()


async def test_another_claim_than_ours_is_not_taken(tmp_path: Path) -> None:
    """An exporter that would send fewer blocks than were asked for."""
    async with open_rig("gloo", tmp_path) as rig:
        await rig.imports.fetch(await rig.offer([3]), moves({0: 7}))
        offer = await rig.offer([1, 2])
        key = LeaseKey.of(offer)
        assert rig.exports.claim(key, "d-1", [0], "gloo") is LeaseVerdict.OK
        copies = [BlockCopy(i, offer.blocks[i], BlockRef(i, 1), None) for i in range(2)]
        proof = LeaseProof(key.lease_id, key.secret)
        peer = rig.exports.describe()
        with pytest.raises(PeerLost, match="another claim"):
            await asyncio.to_thread(importer_of(rig).fetch, peer, proof, copies, CancelFlag())
        rig.require_untouched(except_ids=(7,))


async def test_nccl_sends_a_claim_at_once_and_only_what_the_device_finished(tmp_path: Path) -> None:
    async with open_rig("nccl", tmp_path) as rig:
        await rig.imports.fetch(await rig.offer([5, 3, 9]), moves({0: 2, 1: 3, 2: 4}))
        device, _ = rig.devices
        assert device is not None and device.log == ["synchronize", "send 3"]


def test_nccl_refuses_two_pools_on_one_gpu(tmp_path: Path) -> None:
    device = FakeDevice("GPU-a", tmp_path)
    with allocate_pool("cuda", LAYOUT_ON_GPU, 8, tmp_path, "d-1", 1, device) as pool:
        importer = NcclImporter(pool, TransportSettings())
        address = DistAddress("nccl", "127.0.0.1", 9, "GPU-a")
        with pytest.raises(PeerLost, match="two ranks on one GPU; use cuda_ipc"):
            importer.connect(Peer("p-1", 1, LAYOUT_ON_GPU, 8, (address,)))


def test_each_takes_pools_where_it_can_read_them(tmp_path: Path) -> None:
    device = FakeDevice("GPU-a", tmp_path)
    settings = TransportSettings(pool_dir=tmp_path)
    with (
        allocate_pool("plain", LAYOUT, 8, tmp_path, "p-1", 1) as on_host,
        allocate_pool("plain", LAYOUT_ON_GPU, 8, tmp_path, "p-1", 1) as unchecked,
        allocate_pool("cuda", LAYOUT_ON_GPU, 8, tmp_path, "p-1", 1, device) as on_gpu,
    ):
        with pytest.raises(ConfigError, match="on a GPU"):
            make_exporters("nccl", on_host, settings)
        with pytest.raises(ConfigError, match="checksums"):
            make_exporters("gloo", unchecked, settings)
        for transport in ("gloo", "tcp", "shm", "loopback"):
            with pytest.raises(ConfigError, match="the pool is on a GPU"):
                make_exporters(transport, on_gpu, settings)


def test_off_loopback_needs_a_trusted_network(tmp_path: Path) -> None:
    """Also with TLS files: the group's own connections would not use them."""
    with allocate_pool("plain", LAYOUT, 8, tmp_path, "p-1", 1) as pool:
        with pytest.raises(ConfigError, match="--insecure-transfer"):
            make_exporters("gloo", pool, TransportSettings(host="0.0.0.0"))
        importer = GlooImporter(pool, TransportSettings())
        peer = Peer("p-2", 1, LAYOUT, 8, (DistAddress("gloo", "10.1.2.3", 9),))
        with pytest.raises(PeerLost, match="not encrypted"):
            importer.connect(peer)
