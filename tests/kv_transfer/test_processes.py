"""Exporter and importer in processes of their own, and the exporter killed or frozen at each
point of a fetch."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bench.exporter import LAYOUTS, TOKEN, random_rows
from common import failpoints, wire
from common.config import PROTOCOL_VERSION
from common.errors import LeaseRefused, PeerLost
from common.types import Offer
from kv_transfer.base import TransportSettings
from kv_transfer.control import GrpcKVControl
from kv_transfer.host import this_host
from kv_transfer.imports import Imports
from kv_transfer.layout import NO_CHECKSUM
from kv_transfer.lease import LeaseVerdict
from kv_transfer.memory import PoolMemory, allocate_pool, sweep_dead_pools
from kv_transfer.registry import make_importers, pool_kind
from kv_transfer.transfers import TransferThread
from tests.kv_transfer.rig import make_devices, moves
from tests.kv_transfer.test_memory import run_module, stop

LAYOUT = LAYOUTS["tiny"]
POINTS = ("before_claim", "after_claim", "copy_block", "before_settle")
NUM_BLOCKS = 24
EXPECTED = random_rows(NUM_BLOCKS, LAYOUT.block_bytes)


class Exporter:
    """bench/exporter.py as a child; one with a GPU has that of tests/kv_transfer/fake_device.py."""

    def __init__(self, transport: str, folder: Path, epoch: int = 1, lease_s: float = 3.0) -> None:
        options = {"transport": transport, "folder": folder, "epoch": epoch, "lease-s": lease_s}
        flags = [f"--{name}={value}" for name, value in options.items()]
        on_device = pool_kind(transport) == "cuda"
        module = "tests.kv_transfer.fake_exporter" if on_device else "bench.exporter"
        self.child = run_module(module, *flags)
        assert self.child.stdin is not None and self.child.stdout is not None
        self._in, self._out = self.child.stdin, self.child.stdout
        self.endpoint = json.loads(self._out.readline())["endpoint"]

    def offer(self, *block_ids: int) -> Offer:
        self._in.write(",".join(map(str, block_ids)) + "\n")
        self._in.flush()
        message = wire.worker.Offer.FromString(bytes.fromhex(self._out.readline()))
        return wire.offer_from_proto(message)

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    def kill(self) -> None:
        stop(self.child)

    def leave(self) -> int:
        self._in.close()
        code = self.child.wait(10)
        self._out.close()
        return code


@dataclass
class Served:
    transport: str
    folder: Path
    exporter: Exporter


@dataclass
class Importer:
    pool: PoolMemory
    imports: Imports
    control: GrpcKVControl


@asynccontextmanager
async def importer(transport: str, folder: Path) -> AsyncIterator[Importer]:
    host, transfers = this_host(), TransferThread()
    _, device = make_devices(transport, folder)
    kind, layout = ("cuda", replace(LAYOUT, checksum=NO_CHECKSUM)) if device else ("plain", LAYOUT)
    with allocate_pool(kind, layout, NUM_BLOCKS, folder, "importer", 1, device) as pool:
        control = GrpcKVControl("importer", 1, layout, host, TOKEN, PROTOCOL_VERSION)
        importers = make_importers(transport, pool, TransportSettings(pool_dir=folder))
        imports = Imports(pool, importers, transfers, control, host)
        try:
            yield Importer(pool, imports, control)
        finally:
            failpoints.arm("")
            await imports.close()
            await control.close()
            transfers.close()
            if device is not None:
                device.require_closed()


@pytest.fixture(scope="module", params=["shm", "tcp"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One exporter for all tests that leave it alive; it must end cleanly."""
    folder = tmp_path_factory.mktemp("pools")
    exporter = Exporter(request.param, folder)
    yield Served(request.param, folder, exporter)
    assert exporter.leave() == 0
    assert sweep_dead_pools(folder) == 0, "a clean end leaves no file"


async def test_bytes_cross_processes(served: Served) -> None:
    async with importer(served.transport, served.folder) as here:
        for _ in range(3):
            offer = served.exporter.offer(3, 7, 9)
            result = await here.imports.fetch(offer, moves({0: 1, 2: 5}))
            assert (result.transport, result.num_blocks) == (served.transport, 2)
        assert (here.pool.rows[[1, 5]] == EXPECTED[[3, 9]]).all()
        assert not here.pool.rows[[0, 2, 3, 4]].any()


async def test_many_at_once(served: Served) -> None:
    """240 healthy transfers, no false alarm."""
    async with importer(served.transport, served.folder) as here:
        offers = [served.exporter.offer(i % NUM_BLOCKS) for i in range(240)]
        fetches = (
            here.imports.fetch(offer, moves({0: i % NUM_BLOCKS})) for i, offer in enumerate(offers)
        )
        await asyncio.gather(*fetches)
        assert (here.pool.rows == EXPECTED).all()
        assert here.imports.statistics().num_failures == {}


@pytest.mark.fault("F6")
async def test_a_short_freeze_changes_nothing(served: Served) -> None:
    async with importer(served.transport, served.folder) as here:
        await _fetch_over_freeze(here, served.exporter, freeze_s=1.5)
        assert (here.pool.rows[2] == EXPECTED[5]).all()


@pytest.mark.full
@pytest.mark.fault("F6")
async def test_a_long_freeze_is_a_lost_peer(served: Served) -> None:
    async with importer(served.transport, served.folder) as here:
        with pytest.raises(PeerLost):
            await _fetch_over_freeze(here, served.exporter, freeze_s=6.0)
        await here.imports.fetch(served.exporter.offer(5), moves({0: 2}))


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.full)])
@pytest.mark.fault("F2")
async def test_killed_at_each_point(transport: str, tmp_path: Path) -> None:
    """Never a half block: the fetch ends in PeerLost, quickly. The worker comes back in a new
    epoch, refuses what the old one offered, and serves."""
    exporter = Exporter(transport, tmp_path)
    async with importer(transport, tmp_path) as here:
        for epoch, point in enumerate(POINTS, start=2):
            unclaimed = exporter.offer(1)
            await here.imports.fetch(exporter.offer(5), moves({0: 9}))
            assert (here.pool.rows[9] == EXPECTED[5]).all()
            offer = exporter.offer(*range(4))
            failpoints.arm(f"decode.{point}=sleep:0.2@1")
            fetching = asyncio.create_task(
                here.imports.fetch(offer, moves({index: index for index in range(4)}))
            )
            await asyncio.sleep(0.1)
            exporter.kill()
            async with asyncio.timeout(5):
                with pytest.raises(PeerLost):
                    await fetching
            failpoints.arm("")
            assert here.imports.statistics().links == {}
            assert sweep_dead_pools(tmp_path) == (1 if transport == "shm" else 0)
            exporter = Exporter(transport, tmp_path, epoch)
            with pytest.raises(LeaseRefused) as caught:
                moved = replace(unclaimed, endpoint=exporter.endpoint)
                await here.imports.fetch(moved, moves({0: 2}))
            assert caught.value.verdict == LeaseVerdict.STALE_EPOCH
    assert exporter.leave() == 0


async def _fetch_over_freeze(here: Importer, exporter: Exporter, freeze_s: float) -> None:
    offer = exporter.offer(5)
    failpoints.arm("decode.before_settle=sleep:0.1")
    fetching = asyncio.create_task(here.imports.fetch(offer, moves({0: 2})))
    await asyncio.sleep(0.05)
    exporter.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(freeze_s)
    finally:
        exporter.signal(signal.SIGCONT)
    failpoints.arm("")
    await fetching
