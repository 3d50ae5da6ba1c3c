"""The lease table alone, under a clock of the test's."""

import random

import pytest

from common.types import BlockRef
from kv_transfer.lease import (
    NUM_REMEMBERED,
    LeaseEnd,
    LeaseKey,
    LeaseState,
    LeaseTable,
    LeaseVerdict,
)

BLOCKS = tuple(BlockRef(block_id, 1) for block_id in (4, 5, 6))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Held:
    """One lease and what its end said."""

    def __init__(self, table: LeaseTable, attempt: int = 1) -> None:
        self.ends: list[LeaseEnd] = []
        grant = table.offer(BLOCKS, attempt, self.ends.append)
        self.key = LeaseKey(grant.lease_id, grant.secret, table.epoch, attempt)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> LeaseTable:
    return LeaseTable(epoch=3, lease_s=10.0, clock=clock)


def test_offered_claimed_settled(table: LeaseTable) -> None:
    held = Held(table)
    assert table.settle(held.key) is not LeaseVerdict.OK, "settled before it was claimed"
    assert table.claim(held.key, "d-1", [0, 2]) is LeaseVerdict.OK
    assert table.claimed_blocks(held.key.lease_id) == (BLOCKS[0], BLOCKS[2])
    assert table.leases()[0].claimer == "d-1"
    assert table.settle(held.key) is LeaseVerdict.OK
    (end,) = held.ends
    assert (end.state, end.blocks, end.claimed) == (
        LeaseState.SETTLED,
        BLOCKS,
        (BLOCKS[0], BLOCKS[2]),
    )
    assert table.claimed_blocks(held.key.lease_id) == ()
    assert table.leases() == ()


@pytest.mark.parametrize("claimed", [False, True])
def test_expiry_is_from_the_last_renewal(table: LeaseTable, clock: Clock, claimed: bool) -> None:
    held = Held(table)
    if claimed:
        table.claim(held.key, "d-1", [0])
    clock.now += 9.0
    assert table.renew(held.key) is LeaseVerdict.OK
    assert table.next_expiry_s() == clock.now + 10.0
    clock.now += 9.9
    assert table.expire_due() == 0
    clock.now += 0.1
    assert table.expire_due() == 1
    assert held.ends[0].state is LeaseState.EXPIRED
    assert table.renew(held.key) is LeaseVerdict.EXPIRED
    assert table.next_expiry_s() is None


def test_a_renewal_that_waited_is_in_time(table: LeaseTable, clock: Clock) -> None:
    """Overdue, but not judged yet: nothing was reused, so the renewal holds."""
    held = Held(table)
    clock.now += 30.0
    assert table.renew(held.key) is LeaseVerdict.OK
    assert table.expire_due() == 0
    assert held.ends == []


def test_every_refusal_is_counted(table: LeaseTable) -> None:
    held = Held(table, attempt=2)
    key = held.key
    wrong = {
        LeaseVerdict.STALE_EPOCH: LeaseKey(key.lease_id, key.secret, 2, 2),
        LeaseVerdict.UNKNOWN: LeaseKey("0", key.secret, 3, 2),
        LeaseVerdict.BAD_SECRET: LeaseKey(key.lease_id, key.secret[:-1] + b"?", 3, 2),
        LeaseVerdict.STALE_ATTEMPT: LeaseKey(key.lease_id, key.secret, 3, 1),
    }
    for verdict, bad in wrong.items():
        assert table.claim(bad, "d-1", [0]) is verdict
        assert table.renew(bad) is verdict
        assert table.settle(bad) is verdict
        assert table.release(bad) is verdict
    refused = table.statistics().refused
    assert refused == {
        (operation, verdict): 1
        for operation in ("claim", "renew", "settle", "release")
        for verdict in wrong
    }
    assert table.statistics().offered == 1


def test_ended_leases_are_remembered_within_bounds(table: LeaseTable) -> None:
    first = Held(table)
    table.release(first.key)
    for _ in range(NUM_REMEMBERED):
        table.release(Held(table).key)
    assert table.renew(first.key) is LeaseVerdict.UNKNOWN


def test_leaving_releases_all(table: LeaseTable) -> None:
    held = [Held(table) for _ in range(3)]
    table.claim(held[1].key, "d-1", [1])
    table.release_all()
    assert [h.ends[0].state for h in held] == [LeaseState.RELEASED] * 3


def test_an_end_that_raises_keeps_no_other_lease(table: LeaseTable, clock: Clock) -> None:
    def broken(end: LeaseEnd) -> None:
        raise RuntimeError("on_end is broken")

    table.offer(BLOCKS, 1, broken)
    held = Held(table)
    clock.now += 10.0
    assert table.expire_due() == 2
    assert held.ends[0].state is LeaseState.EXPIRED
    table.offer(BLOCKS, 1, broken)
    held = Held(table)
    table.release_all()
    assert held.ends[0].state is LeaseState.RELEASED


def test_secrets_do_not_show(table: LeaseTable) -> None:
    held = Held(table)
    secret = held.key.secret
    shown = repr(held.key) + repr(table.leases()) + repr(table.statistics())
    assert secret.hex() not in shown
    assert repr(secret) not in shown
    assert len(secret) == 16
    assert held.key.lease_id != Held(table).key.lease_id


@pytest.mark.parametrize("seed", range(20))
def test_random_schedules_end_each_lease_once(seed: int, clock: Clock, table: LeaseTable) -> None:
    """Whatever comes in whatever order: one way through the states, one claimer, one end, OK to
    settle only in time, and the sums of the statistics hold."""
    rng = random.Random(seed)
    leases: list[Held] = []
    claims: dict[str, int] = {}
    settled: dict[str, int] = {}
    for _ in range(500):
        action = rng.randrange(7)
        clock.now += rng.choice((0.0, 0.1, 3.0))
        if action == 0 or not leases:
            leases.append(Held(table, attempt=rng.randrange(1, 3)))
            continue
        held = rng.choice(leases[-6:])
        lease_id, live = held.key.lease_id, not held.ends
        if action == 1 and table.claim(held.key, "d-1", [0]) is LeaseVerdict.OK:
            claims[lease_id] = claims.get(lease_id, 0) + 1
            assert live
        elif action == 2:
            assert (table.renew(held.key) is LeaseVerdict.OK) == live
        elif action == 3 and table.settle(held.key) is LeaseVerdict.OK:
            settled[lease_id] = settled.get(lease_id, 0) + 1
            assert live and lease_id in claims
        elif action == 4:
            assert (table.release(held.key) is LeaseVerdict.OK) == live
        elif action == 5:
            table.expire_due()
        else:
            stale = LeaseKey(lease_id, held.key.secret, 3, held.key.attempt + 1)
            assert table.settle(stale) is not LeaseVerdict.OK
        assert len(held.ends) <= 1
    assert set(claims.values()) <= {1}
    assert set(settled.values()) <= {1}
    numbers = table.statistics()
    ended = numbers.num_settled + numbers.num_expired + numbers.num_released
    assert ended == sum(len(held.ends) for held in leases)
    assert numbers.num_offered == ended + numbers.offered + numbers.claimed
