"""Either end killed in mid-copy: the other says so within seconds, lives on, and serves or fetches
again. gloo and nixl as they are; cuda_ipc and nccl over a device that tests bring."""

import asyncio
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from common import failpoints, wire
from common.errors import LeaseRefused, PeerLost
from common.types import Offer
from kv_transfer.lease import LeaseVerdict
from tests.kv_transfer.rig import moves, reached
from tests.kv_transfer.test_memory import run_module, stop
from tests.kv_transfer.test_processes import EXPECTED, Exporter, importer

# As gloo, by the same code.
NCCL = pytest.param("nccl", marks=pytest.mark.full)
NIXL = pytest.param(
    "nixl",
    marks=[
        pytest.mark.full,
        pytest.mark.skipif(
            importlib.util.find_spec("nixl_cu12") is None,
            reason="the extra baton[nixl] is not installed",
        ),
    ],
)
BLOCKS = range(8)
ALL = moves({index: index for index in BLOCKS})
# A peer may be silent for 3 s; less than twice as long is soon enough.
SOON_S = 6.0


@pytest.mark.parametrize("transport", ["gloo", NCCL, "cuda_ipc", NIXL])
async def test_killed_in_mid_copy(transport: str, tmp_path: Path) -> None:
    exporter = Exporter(transport, tmp_path, lease_s=30.0)
    async with importer(transport, tmp_path) as here:
        await asyncio.to_thread(fetch_and_die, transport, tmp_path, exporter.offer(*BLOCKS))
        await here.imports.fetch(exporter.offer(5), moves({0: 9}))
        assert (here.pool.rows[9] == EXPECTED[5]).all(), "the exporter outlives its importer"

        unclaimed, offer = exporter.offer(1), exporter.offer(*BLOCKS)
        failpoints.arm("decode.copy_block=sleep:0.1")
        fetching = asyncio.create_task(here.imports.fetch(offer, ALL))
        await reached("decode.copy_block")
        exporter.kill()
        async with asyncio.timeout(SOON_S):
            with pytest.raises(PeerLost):
                await fetching
        failpoints.arm("")
        assert here.imports.statistics().links == {}

        exporter = Exporter(transport, tmp_path, epoch=2)
        with pytest.raises(LeaseRefused) as caught:
            await here.imports.fetch(moved(unclaimed, exporter), moves({0: 2}))
        assert caught.value.verdict == LeaseVerdict.STALE_EPOCH
        await here.imports.fetch(exporter.offer(*BLOCKS), ALL)
        assert (here.pool.rows[: len(BLOCKS)] == EXPECTED[: len(BLOCKS)]).all()
    assert exporter.leave() == 0


def fetch_and_die(transport: str, folder: Path, offer: Offer) -> None:
    """Another process claims the offer and is killed while it copies."""
    child = run_module(
        "tests.kv_transfer.fetcher", f"--transport={transport}", f"--folder={folder}"
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(wire.offer_to_proto(offer).SerializeToString().hex() + "\n")
    child.stdin.flush()
    assert child.stdout.readline() == "copying\n"
    stop(child)


def moved(offer: Offer, exporter: Exporter) -> Offer:
    return replace(offer, endpoint=exporter.endpoint)
