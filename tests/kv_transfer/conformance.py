"""What every transport must do. Each check takes a backend's name and an empty folder, and raises
AssertionError where the transport, or the glue around it, does not hold."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common import failpoints
from common.errors import (
    ChecksumMismatch,
    LayoutMismatch,
    LeaseRefused,
    PeerLost,
    TransferError,
)
from kv_transfer.lease import LeaseKey, LeaseState, LeaseVerdict
from tests.kv_transfer.rig import (
    ENDPOINT,
    LAYOUT,
    altered,
    cut_renewals,
    moves,
    open_rig,
    reached,
    second_importer,
)

Check = Callable[[str, Path], Awaitable[None]]


async def bytes_arrive_and_nothing_else_changes(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        offer = await rig.offer([5, 3, 9, 17])
        result = await rig.imports.fetch(offer, moves({0: 2, 3: 7, 1: 20}))
        for source, target in ((5, 2), (17, 7), (3, 20)):
            assert (rig.exporter_pool.rows[source] == rig.importer_pool.rows[target]).all()
        rig.require_untouched(except_ids=(2, 7, 20))
        assert (result.num_blocks, result.num_bytes) == (3, 3 * LAYOUT.block_bytes)
        assert result.transport == backend
        assert [end.state for end in rig.ends] == [LeaseState.SETTLED]
        assert {block.block_id for block in rig.ends[0].blocks} == {5, 3, 9, 17}
        assert rig.exports.statistics().num_blocks == {backend: 3}
        assert rig.imports.statistics().num_bytes == {backend: result.num_bytes}


async def every_block_of_a_pool_at_once(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        order = [int(i) for i in np.random.default_rng(1).permutation(len(rig.exporter_pool.rows))]
        offer = await rig.offer(order)
        await rig.imports.fetch(offer, moves(dict(enumerate(range(len(order))))))
        assert (rig.importer_pool.rows == rig.exporter_pool.rows[order]).all()


async def tensors_are_those_bytes(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        shape = (len(rig.exporter_pool.rows), *LAYOUT.block_shape)
        assert rig.exporter_pool.tensor.shape == shape
        rig.exporter_pool.tensor[4, 1, 0, 2, 1] = 0.25
        offer = await rig.offer([4])
        await rig.imports.fetch(offer, moves({0: 1}))
        assert (rig.importer_pool.tensor[1, 1, 0, 2, 1] == 0.25).all()


async def many_fetches_at_once(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        offers = [await rig.offer([block, block + 1]) for block in range(0, 20, 2)]
        await asyncio.gather(
            *(
                rig.imports.fetch(offer, moves({0: 2 * i, 1: 2 * i + 1}))
                for i, offer in enumerate(offers)
            )
        )
        assert (rig.importer_pool.rows[:20] == rig.exporter_pool.rows[:20]).all()
        assert len(rig.ends) == len(offers)


async def nothing_to_copy_gives_the_lease_back(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        result = await rig.imports.fetch(await rig.offer([1, 2]), [])
        assert result.num_blocks == 0
        assert rig.imports.statistics().num_bytes == {}  # by no transport
        assert [end.state for end in rig.ends] == [LeaseState.RELEASED]
        rig.require_untouched()


async def another_layout_is_refused_by_field(backend: str, folder: Path) -> None:
    other = replace(LAYOUT, num_kv_heads=1)
    async with open_rig(backend, folder, importer_layout=other) as rig:
        offer = await rig.offer([1])
        with pytest.raises(LayoutMismatch) as caught:
            await rig.imports.fetch(offer, moves({0: 2}))
        assert caught.value.field == "num_kv_heads"
        # A ticket that lies about its layout gains nothing: the worker's own Hello decides.
        with pytest.raises(LayoutMismatch):
            await rig.imports.fetch(replace(await rig.offer([3]), layout=other), moves({0: 2}))
        rig.require_untouched()
        await rig.require_no_lease()


async def a_wrong_secret_gets_nothing(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        offer = await rig.offer([1])
        await rig.require_refused(replace(offer, secret=bytes(16)), LeaseVerdict.BAD_SECRET)
        await rig.require_refused(replace(offer, secret=b""), LeaseVerdict.BAD_SECRET)
        other = await rig.offer([2])
        await rig.require_refused(replace(offer, lease_id=other.lease_id), LeaseVerdict.BAD_SECRET)
        assert rig.exports.statistics().leases.offered == 2


async def a_stale_attempt_gets_nothing(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        offer = await rig.offer([1], attempt=2)
        await rig.require_refused(replace(offer, attempt=1), LeaseVerdict.STALE_ATTEMPT)


async def a_stale_epoch_gets_nothing(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        offer = await rig.offer([1])
        await rig.require_refused(replace(offer, epoch=offer.epoch - 1), LeaseVerdict.STALE_EPOCH)
        key = LeaseKey.of(replace(offer, epoch=offer.epoch - 1))
        assert rig.exports.claim(key, "d-1", [0], backend) is LeaseVerdict.STALE_EPOCH
        assert rig.exports.settle(key) is LeaseVerdict.STALE_EPOCH


async def a_used_ticket_gets_nothing(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        offer = await rig.offer([1])
        await rig.imports.fetch(offer, moves({0: 9}))
        rig.importer_pool.rows[9] = 0xA5
        await rig.require_refused(offer, LeaseVerdict.SETTLED)
        released = await rig.offer([1])
        await rig.imports.release(released)
        await rig.require_refused(released, LeaseVerdict.RELEASED)
        await rig.require_refused(replace(released, lease_id="0" * 32), LeaseVerdict.UNKNOWN)
        assert len(rig.ends) == 2


async def one_claimer_an_offer(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        offer = await rig.offer([1, 2])
        failpoints.arm("decode.before_settle=sleep:0.05")
        results = await asyncio.gather(
            rig.imports.fetch(offer, moves({0: 2})),
            rig.imports.fetch(offer, moves({1: 3})),
            return_exceptions=True,
        )
        refused = [result for result in results if isinstance(result, LeaseRefused)]
        assert [error.verdict for error in refused] == [LeaseVerdict.TAKEN], results
        assert len(rig.ends) == 1


async def blocks_outside_the_offer_are_refused(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        offer = await rig.offer([1, 2])
        for indices in ([2], [0, 0], [], [-1], [0, 1 << 31]):
            verdict = rig.exports.claim(LeaseKey.of(offer), "d-1", indices, backend)
            assert verdict is LeaseVerdict.BAD_BLOCKS, indices
        with pytest.raises(TransferError):
            await rig.imports.fetch(offer, moves({2: 5}))
        rig.require_untouched()


async def a_ticket_naming_other_blocks_is_found(backend: str, folder: Path) -> None:
    """Foreign blocks fail their checksum, where there is one, or are not served at all; blocks
    outside the pool are never read."""
    async with open_rig(backend, folder) as rig:
        for block_id in (8, 10**6, 2**31 - 1)[0 if rig.checked else 1 :]:
            offer = await rig.offer([1, 2])
            forged = altered(offer, 1, block_id)
            try:
                await rig.imports.fetch(forged, moves({1: 4}))
            except TransferError:
                pass
            else:  # a backend that asks by the claim alone is not misled
                assert (rig.importer_pool.rows[4] == rig.exporter_pool.rows[2]).all()
            rig.require_untouched(except_ids=(4,))
            await rig.require_no_lease()


async def one_flipped_bit_is_found(backend: str, folder: Path) -> None:
    """In the source after the offer, at the ends, in the middle, anywhere."""
    async with open_rig(backend, folder) as rig:
        rng = np.random.default_rng(2)
        num_bits = LAYOUT.block_bytes * 8
        for bit in (0, num_bits - 1, num_bits // 2, *rng.integers(0, num_bits, 20)):
            offer = await rig.offer([6, 7])
            rig.exporter_pool.rows[7, bit // 8] ^= np.uint8(1 << (bit % 8))
            with pytest.raises(ChecksumMismatch) as caught:
                await rig.imports.fetch(offer, moves({0: 1, 1: 2}))
            assert caught.value.index == 1
        await rig.require_no_lease()
        assert {end.state for end in rig.ends} == {LeaseState.RELEASED}


async def a_bit_flipped_on_the_way_is_found(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        offer = await rig.offer([6, 7])
        failpoints.arm("transfer.corrupt_block=corrupt@2")
        with pytest.raises(ChecksumMismatch):
            await rig.imports.fetch(offer, moves({0: 1, 1: 2}))


async def a_block_left_out_is_found(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        offer = await rig.offer([6, 7])
        failpoints.arm("decode.copy_block=drop@2")
        with pytest.raises(ChecksumMismatch):
            await rig.imports.fetch(offer, moves({0: 1, 1: 2}))


async def an_expired_lease_spoils_the_copy(backend: str, folder: Path) -> None:
    """The copy outlives its lease: its blocks are reused, and settle says so."""
    async with open_rig(backend, folder, lease_s=0.3) as rig:
        cut_renewals(rig)
        offer = await rig.offer([1, 2])
        failpoints.arm("decode.before_settle=sleep:0.7")
        with pytest.raises(LeaseRefused) as caught:
            await rig.imports.fetch(offer, moves({0: 3, 1: 4}))
        assert caught.value.verdict == LeaseVerdict.EXPIRED
        assert [end.state for end in rig.ends] == [LeaseState.EXPIRED]


async def a_lease_that_expires_in_mid_copy_ends_it(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder, lease_s=0.3) as rig:
        cut_renewals(rig)
        offer = await rig.offer([1, 2])
        failpoints.arm("decode.copy_block=sleep:0.5")
        with pytest.raises(TransferError):
            await rig.imports.fetch(offer, moves({0: 3, 1: 4}))
        assert [end.state for end in rig.ends] == [LeaseState.EXPIRED]


async def a_slow_copy_is_renewed(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder, lease_s=0.3) as rig:
        offer = await rig.offer([1, 2, 3])
        failpoints.arm("decode.copy_block=sleep:0.3")
        await rig.imports.fetch(offer, moves({0: 3, 1: 4, 2: 5}))
        assert [end.state for end in rig.ends] == [LeaseState.SETTLED]


async def a_refused_renewal_stops_the_copy(backend: str, folder: Path) -> None:
    """Released by somebody else in mid-copy: the importer learns it before the end."""
    async with open_rig(backend, folder, lease_s=0.3) as rig:
        offer = await rig.offer(range(1, 7))
        failpoints.arm("decode.copy_block=sleep:0.2")
        fetching = asyncio.create_task(
            rig.imports.fetch(offer, moves({i: i + 1 for i in range(6)}))
        )
        await asyncio.sleep(0.1)
        rig.exports.release(LeaseKey.of(offer))
        with pytest.raises(TransferError):
            await fetching
        assert (rig.importer_pool.rows[6] == 0xA5).all(), "the copy went on to its end"


async def an_unclaimed_offer_expires(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder, lease_s=0.2) as rig:
        await rig.offer([1])
        second = await rig.offer([2])
        await rig.require_no_lease()
        assert [end.state for end in rig.ends] == [LeaseState.EXPIRED] * 2
        await rig.require_refused(second, LeaseVerdict.EXPIRED)


async def cancelled_only_after_the_copy_stopped(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        offer = await rig.offer([1, 2, 3])
        failpoints.arm("decode.copy_block=sleep:0.2")
        fetching = asyncio.create_task(rig.imports.fetch(offer, moves({0: 3, 1: 4, 2: 5})))
        await asyncio.sleep(0.1)
        fetching.cancel()
        await asyncio.sleep(0)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        before = rig.importer_pool.rows.copy()
        assert rig.imports.statistics().fetching == 0
        await asyncio.sleep(0.5)
        assert (rig.importer_pool.rows == before).all(), "a copy ran on after its fetch had ended"
        assert (rig.importer_pool.rows[5] == 0xA5).all(), "the copy went on to its end"
        assert [end.state for end in rig.ends] == [LeaseState.RELEASED]


async def cancelled_at_each_point(backend: str, folder: Path) -> None:
    for point in ("before_claim", "after_claim", "before_settle", "after_settle"):
        async with open_rig(backend, folder) as rig:
            offer = await rig.offer([1])
            failpoints.arm(f"decode.{point}=sleep:0.05")
            fetching = asyncio.create_task(rig.imports.fetch(offer, moves({0: 3})))
            await reached(f"decode.{point}")
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            await rig.require_no_lease()
            settled = point == "after_settle"
            expected = LeaseState.SETTLED if settled else LeaseState.RELEASED
            assert [end.state for end in rig.ends] == [expected], point
            failpoints.arm("")


async def a_peer_gone_before_hello(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        offer = await rig.offer([1])
        rig.endpoints.clear()
        with pytest.raises(PeerLost):
            await rig.imports.fetch(offer, moves({0: 3}))
        rig.endpoints[ENDPOINT] = rig.exports
        await rig.imports.fetch(offer, moves({0: 3}))


async def a_peer_gone_at_claim_or_settle(backend: str, folder: Path) -> None:
    for point in ("before_claim", "before_settle"):
        async with open_rig(backend, folder, lease_s=1.0) as rig:
            await rig.imports.fetch(await rig.offer([1]), moves({0: 3}))
            offer = await rig.offer([2])
            failpoints.arm(f"decode.{point}=sleep:0.05")
            fetching = asyncio.create_task(rig.imports.fetch(offer, moves({0: 4})))
            await asyncio.sleep(0.02)
            rig.endpoints.clear()
            with pytest.raises(PeerLost):
                await fetching
            assert rig.imports.statistics().links == {}
            failpoints.arm("")
            await rig.require_no_lease()


async def a_pool_that_is_not_there(backend: str, folder: Path) -> None:
    """The worker answers, its pool cannot be reached."""
    async with open_rig(backend, folder) as rig:
        offer = await rig.offer([1])
        rig.exporter_pool.close()
        for exporter in rig.exports._exporters.values():
            exporter.close()
        with pytest.raises(PeerLost):
            await rig.imports.fetch(offer, moves({0: 3}))
        rig.require_untouched()
        await rig.require_no_lease()


async def a_restarted_worker_is_another(backend: str, folder: Path) -> None:
    """Its old tickets are refused by the new epoch, at the same endpoint."""
    async with open_rig(backend, folder) as rig:
        old = await rig.offer([1])
        await rig.imports.fetch(await rig.offer([4]), moves({0: 9}))
        rig.importer_pool.rows[9] = 0xA5
        (folder / "again").mkdir()
        async with open_rig(backend, folder / "again", epoch=old.epoch + 1) as again:
            rig.endpoints[ENDPOINT] = again.exports
            await rig.require_refused(old, LeaseVerdict.STALE_EPOCH)


async def a_second_importer_reads_too(backend: str, folder: Path) -> None:
    async with open_rig(backend, folder) as rig:
        async with second_importer(rig) as (second, pool):
            offers = [await rig.offer([1]), await rig.offer([2])]
            await asyncio.gather(
                rig.imports.fetch(offers[0], moves({0: 5})), second.fetch(offers[1], moves({0: 6}))
            )
            assert (rig.importer_pool.rows[5] == rig.exporter_pool.rows[1]).all()
            assert (pool.rows[6] == rig.exporter_pool.rows[2]).all()
        await rig.imports.fetch(await rig.offer([3]), moves({0: 7}))


CHECKS: list[Check] = [
    bytes_arrive_and_nothing_else_changes,
    every_block_of_a_pool_at_once,
    tensors_are_those_bytes,
    many_fetches_at_once,
    nothing_to_copy_gives_the_lease_back,
    another_layout_is_refused_by_field,
    a_wrong_secret_gets_nothing,
    a_stale_attempt_gets_nothing,
    a_stale_epoch_gets_nothing,
    a_used_ticket_gets_nothing,
    one_claimer_an_offer,
    blocks_outside_the_offer_are_refused,
    a_ticket_naming_other_blocks_is_found,
    an_expired_lease_spoils_the_copy,
    a_lease_that_expires_in_mid_copy_ends_it,
    a_slow_copy_is_renewed,
    a_refused_renewal_stops_the_copy,
    an_unclaimed_offer_expires,
    cancelled_only_after_the_copy_stopped,
    cancelled_at_each_point,
    a_peer_gone_before_hello,
    a_peer_gone_at_claim_or_settle,
    a_pool_that_is_not_there,
    a_restarted_worker_is_another,
    a_second_importer_reads_too,
]

CORRUPTION_CHECKS: list[Check] = [  # only where blocks carry checksums
    one_flipped_bit_is_found,
    a_bit_flipped_on_the_way_is_found,
    a_block_left_out_is_found,
]
