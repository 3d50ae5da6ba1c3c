"""Negative twins: with a guard taken out, the check that guards it must fail."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common import failpoints
from common.errors import TransferError
from kv_transfer import copying, exports, imports, lease, links, loopback, renewal, shm
from kv_transfer.lease import LeaseKey, LeaseState, LeaseTable
from tests.kv_transfer import conformance, rig
from tests.kv_transfer.conformance import Check

Sabotage = Callable[[pytest.MonkeyPatch], None]
# What a failing check raises: its own assertion, pytest.raises' verdict, or the wrong error.
FAILURES = (
    AssertionError,
    pytest.fail.Exception,
    LookupError,
    TimeoutError,
    TransferError,
    ValueError,
)


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


def no_checksums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(copying, "check_row", lambda row, copy, hash_bytes: None)


def no_verdicts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(imports, "_require_ok", lambda verdict: None)


def any_secret(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease.hmac, "compare_digest", lambda ours, theirs: True)


def _lenient_find(patch: pytest.MonkeyPatch, change: Callable[[LeaseTable, LeaseKey], Any]) -> None:
    strict = LeaseTable._find
    patch.setattr(LeaseTable, "_find", lambda self, op, key: strict(self, op, change(self, key)))


def any_epoch(patch: pytest.MonkeyPatch) -> None:
    _lenient_find(patch, lambda table, key: replace(key, epoch=table.epoch))


def any_attempt(patch: pytest.MonkeyPatch) -> None:
    _lenient_find(patch, lambda table, key: replace(key, attempt=table._live[key.lease_id].attempt))


def many_claimers(patch: pytest.MonkeyPatch) -> None:
    strict = LeaseTable.claim

    def claim(self: LeaseTable, key: LeaseKey, *rest: Any) -> lease.LeaseVerdict:
        if key.lease_id in self._live:
            self._live[key.lease_id].state = LeaseState.OFFERED
        return strict(self, key, *rest)

    patch.setattr(LeaseTable, "claim", claim)


def reusable_tickets(patch: pytest.MonkeyPatch) -> None:
    def end(self: LeaseTable, ended: lease._Lease, state: LeaseState) -> None:
        self._entered[state] += 1
        ended.state = LeaseState.OFFERED
        ended.on_end(lease.LeaseEnd(ended.lease_id, state, ended.blocks, ended.claimed))

    patch.setattr(LeaseTable, "_end", end)
    patch.setattr(LeaseTable, "release_all", lambda self: None)


def any_indices(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "_are_distinct_indices", lambda indices, length: True)


def any_source(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(copying, "require_in_pool", lambda block_id, num_blocks: None)


def any_layout(patch: pytest.MonkeyPatch) -> None:
    for module in (imports, links, loopback, shm):
        patch.setattr(module, "require_compatible", lambda ours, theirs: None)


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    async def returned(future: asyncio.Future[Any], cancel: Any) -> Any:
        return await future

    patch.setattr(imports, "_returned", returned)


def no_cancelling(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(copying, "go_on", lambda cancel: None)


def no_renewals(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(renewal.Renewer, "hold", lambda *args: None)
    patch.setattr(renewal.Renewer, "drop", lambda *args: None)


def no_expiry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseTable, "expire_due", lambda self: 0)
    patch.setattr(rig, "WAIT_S", 0.6)


def no_release(patch: pytest.MonkeyPatch) -> None:
    async def release(self: imports.Imports, offer: object) -> None: ...

    patch.setattr(imports.Imports, "release", release)


def forgotten_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(exports.Exports, "_ended", lambda self, on_end, end: None)


TWINS: list[tuple[Sabotage, Check]] = [
    (no_checksums, conformance.one_flipped_bit_is_found),
    (no_checksums, conformance.a_bit_flipped_on_the_way_is_found),
    (no_checksums, conformance.a_block_left_out_is_found),
    (no_verdicts, conformance.an_expired_lease_spoils_the_copy),
    (no_verdicts, conformance.a_wrong_secret_gets_nothing),
    (any_secret, conformance.a_wrong_secret_gets_nothing),
    (any_epoch, conformance.a_stale_epoch_gets_nothing),
    (any_epoch, conformance.a_restarted_worker_is_another),
    (any_attempt, conformance.a_stale_attempt_gets_nothing),
    (many_claimers, conformance.one_claimer_an_offer),
    (reusable_tickets, conformance.a_used_ticket_gets_nothing),
    (any_indices, conformance.blocks_outside_the_offer_are_refused),
    (any_source, conformance.a_ticket_naming_other_blocks_is_found),
    (any_layout, conformance.another_layout_is_refused_by_field),
    (no_quarantine, conformance.cancelled_only_after_the_copy_stopped),
    (no_cancelling, conformance.cancelled_only_after_the_copy_stopped),
    (no_renewals, conformance.a_slow_copy_is_renewed),
    (no_expiry, conformance.an_unclaimed_offer_expires),
    (no_release, conformance.cancelled_only_after_the_copy_stopped),
    (forgotten_blocks, conformance.bytes_arrive_and_nothing_else_changes),
]


@pytest.mark.parametrize(("sabotage", "check"), TWINS, ids=lambda function: function.__name__)
async def test_a_check_sees_its_guard_missing(
    sabotage: Sabotage, check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises(FAILURES):
        await check("shm", tmp_path)
