"""Tickets and claims shown a second time, when their blocks hold another request's KV."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from common.types import Offer
from kv_transfer.lease import LeaseKey, LeaseVerdict
from kv_transfer.tcp.frames import ASK
from tests.kv_transfer.rig import Rig, cut_renewals, moves, open_rig
from tests.kv_transfer.stranger import frame_of, heard

BLOCKS = [5, 6]


async def settled(rig: Rig, offer: Offer) -> None:
    await rig.imports.fetch(offer, moves({0: 9, 1: 10}))
    rig.importer_pool.rows[9:11] = 0xA5


async def released(rig: Rig, offer: Offer) -> None:
    await rig.imports.release(offer)


async def expired(rig: Rig, offer: Offer) -> None:
    await rig.require_no_lease()


async def expired_after_the_claim(rig: Rig, offer: Offer) -> None:
    cut_renewals(rig)
    assert rig.exports.claim(LeaseKey.of(offer), "d-1", [0, 1], "tcp") is LeaseVerdict.OK
    await rig.require_no_lease()


@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        (settled, LeaseVerdict.SETTLED),
        (released, LeaseVerdict.RELEASED),
        (expired, LeaseVerdict.EXPIRED),
        (expired_after_the_claim, LeaseVerdict.EXPIRED),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
@pytest.mark.fault("F3", "V16")
async def test_a_ticket_whose_blocks_were_reused(
    end: Callable[[Rig, Offer], Awaitable[None]], verdict: LeaseVerdict, tmp_path: Path
) -> None:
    """They lie under a live claim again, of another request; the old ticket opens none of it."""
    async with open_rig("tcp", tmp_path, lease_s=0.4) as rig:
        old = await rig.offer(BLOCKS)
        await end(rig, old)
        rig.exporter_pool.rows[BLOCKS] = 0x5A
        new = await rig.offer(BLOCKS)
        assert rig.exports.claim(LeaseKey.of(new), "d-2", [0, 1], "tcp") is LeaseVerdict.OK
        await rig.require_refused(old, verdict)
        await rig.require_refused(replace(old, lease_id=new.lease_id), LeaseVerdict.BAD_SECRET)
        await rig.require_refused(replace(old, secret=new.secret), LeaseVerdict.BAD_SECRET)
        await rig.require_refused(new, LeaseVerdict.TAKEN)
        for forged in (old, replace(old, lease_id=new.lease_id), replace(old, secret=new.secret)):
            assert await heard(rig, frame_of(LeaseKey.of(forged)) + ASK.pack(0, 2)) == b""
        assert rig.exports.settle(LeaseKey.of(old)) is verdict
        assert rig.exports.renew([LeaseKey.of(old)]) == (verdict,)


@pytest.mark.fault("F3")
async def test_a_ticket_of_an_older_epoch(tmp_path: Path) -> None:
    """The worker came back at the same place, with the same blocks under a live claim."""
    async with open_rig("tcp", tmp_path) as rig:
        old = await rig.offer(BLOCKS)
        (tmp_path / "again").mkdir()
        async with open_rig("tcp", tmp_path / "again", epoch=old.epoch + 1) as again:
            new = await again.offer(BLOCKS)
            key = LeaseKey.of(new)
            assert again.exports.claim(key, "d-2", [0, 1], "tcp") is LeaseVerdict.OK
            await again.require_refused(old, LeaseVerdict.STALE_EPOCH)
            current = replace(old, epoch=new.epoch)
            await again.require_refused(current, LeaseVerdict.UNKNOWN)
            assert await heard(again, frame_of(LeaseKey.of(current)) + ASK.pack(0, 2)) == b""


@pytest.mark.fault("F16")
async def test_a_copy_that_outlives_its_blocks(tmp_path: Path) -> None:
    """Reused in mid-copy: what had come by then is thrown away, what was to come never comes."""
    async with open_rig("tcp", tmp_path, lease_s=0.4) as rig:
        offer = await rig.offer(BLOCKS)
        assert rig.exports.claim(LeaseKey.of(offer), "d-1", [0, 1], "tcp") is LeaseVerdict.OK
        frame = frame_of(LeaseKey.of(offer))
        assert len(await heard(rig, frame + ASK.pack(0, 1), end=True)) > 0
        await asyncio.sleep(0.1)
        await rig.require_no_lease()
        rig.exporter_pool.rows[BLOCKS] = 0x5A
        assert await heard(rig, frame + ASK.pack(1, 1)) == b""
        assert rig.exports.settle(LeaseKey.of(offer)) is LeaseVerdict.EXPIRED
