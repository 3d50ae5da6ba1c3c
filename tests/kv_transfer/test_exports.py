"""The glue of the exporting side: expiry of a process that stood still, leaving, import costs."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.types import BlockRef
from kv_transfer.base import KVExporter
from kv_transfer.lease import LeaseKey, LeaseState, LeaseVerdict
from tests.kv_transfer.rig import HOST, LAYOUT, Rig, open_rig

ROOT = Path(__file__).parents[2]


async def test_time_that_this_process_stood_still_is_not_charged(tmp_path: Path) -> None:
    """The loop hangs for longer than a lease; renewals that come right after it are in time."""
    async with open_rig("loopback", tmp_path, lease_s=0.3) as rig:
        offer = await rig.offer([1])
        await asyncio.sleep(0.05)
        time.sleep(0.6)  # noqa: ASYNC251 - the point of the test
        await asyncio.sleep(0.07)
        assert rig.exports.renew([LeaseKey.of(offer)]) == (LeaseVerdict.OK,)
        assert rig.ends == []
        await rig.require_no_lease()
        assert rig.ends[0].state is LeaseState.EXPIRED


async def test_a_transport_that_cannot_stop_serving_keeps_no_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig("tcp", tmp_path, lease_s=0.2) as rig:
        (exporter,) = rig.exports._exporters.values()
        num_raised = break_once(exporter, monkeypatch)
        for block in range(3):
            key = LeaseKey.of(await rig.offer([block]))
            assert rig.exports.claim(key, "d-1", [0], "tcp") is LeaseVerdict.OK
        await rig.require_no_lease()
        assert num_raised == [1]
        assert sorted(end.blocks[0].block_id for end in rig.ends) == [0, 1, 2]
        await rig.offer([3])
        await rig.require_no_lease()
        assert [end.state for end in rig.ends] == [LeaseState.EXPIRED] * 4


async def test_a_settled_copy_is_good_whatever_the_transport_says_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig("tcp", tmp_path) as rig:
        (exporter,) = rig.exports._exporters.values()
        break_once(exporter, monkeypatch)
        await _hand_over(rig)
        assert [end.state for end in rig.ends] == [LeaseState.SETTLED]
        assert rig.exports.statistics().num_blocks == {"tcp": 1}


def break_once(exporter: KVExporter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Its next ``revoke`` does its work and raises; the list then holds how often it did."""
    num_raised, revoke = [0], exporter.revoke

    def broken(lease_id: str) -> None:
        revoke(lease_id)
        if not num_raised[0]:
            num_raised[0] = 1
            raise RuntimeError("Event loop is closed")

    monkeypatch.setattr(exporter, "revoke", broken)
    return num_raised


async def test_leaving_gives_all_blocks_back(tmp_path: Path) -> None:
    async with open_rig("shm", tmp_path) as rig:
        for block in range(3):
            await rig.offer([block])
        assert len(rig.exports.leases()) == 3
    assert [end.state for end in rig.ends] == [LeaseState.RELEASED] * 3


async def test_an_offer_called_off_holds_nothing(tmp_path: Path) -> None:
    async with open_rig("shm", tmp_path) as rig:
        offering = asyncio.create_task(rig.offer([1]))
        await asyncio.sleep(0)
        offering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await offering
        assert rig.exports.leases() == ()
        assert rig.ends == []


async def test_a_ticket_nobody_took(tmp_path: Path) -> None:
    async with open_rig("shm", tmp_path) as rig:
        offer = await rig.offer([1, 2])
        assert rig.exports.release(LeaseKey.of(offer)) is LeaseVerdict.OK
        assert rig.ends[0].blocks == (BlockRef(1, 7), BlockRef(2, 7))
        assert offer.num_tokens == 2 * LAYOUT.block_size
        assert len(offer.checksums) == 2
        assert repr(offer.secret) not in repr(offer)


def test_copies_run_on_a_machine_that_has_nothing_else() -> None:
    """Kernels and transports need torch and numpy alone; without xxhash the layout says none."""
    code = """
import sys
class Refuse:
    names = {"grpc", "nats", "pydantic", "pydantic_settings", "google", "opentelemetry", "yaml",
             "xxhash", "uvloop", "safetensors", "tokenizers", "transformers", "rich", "typer"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import asyncio
from dataclasses import replace
from pathlib import Path
from common.types import BlockMove, BlockRef
from kv_transfer.checksum import available_checksum
assert available_checksum() == "none"
import tests.kv_transfer.rig as rig
rig.LAYOUT = replace(rig.LAYOUT, checksum="none")
async def main():
    async with rig.open_rig("loopback", Path(), importer_layout=rig.LAYOUT) as it:
        offer = await it.offer([1, 2])
        assert offer.checksums == ()
        await it.imports.fetch(offer, rig.moves({1: 5}))
        assert (it.importer_pool.rows[5] == it.exporter_pool.rows[2]).all()
    import kv_transfer.cuda.ipc, kv_transfer.dist, kv_transfer.nixl, kv_transfer.shm
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


async def test_statistics_are_snapshots(tmp_path: Path) -> None:
    async with open_rig("shm", tmp_path) as rig:
        before = rig.exports.statistics()
        await _hand_over(rig)
        after = rig.exports.statistics()
        assert (before.leases.num_settled, after.leases.num_settled) == (0, 1)
        assert after.num_bytes == {"shm": LAYOUT.block_bytes}
        assert rig.imports.statistics().links["p-1"].transport == "shm"
        assert HOST.shares_memory_with(HOST)


async def _hand_over(rig: Rig) -> None:
    from tests.kv_transfer.rig import moves

    await rig.imports.fetch(await rig.offer([1]), moves({0: 2}))
