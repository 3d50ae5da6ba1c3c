"""The lease table: who may still read which blocks of this pool, decided in one place.

The life of a lease::

    1. offered    the prompt's blocks are held for whoever brings the ticket
    2. claimed    one importer, once, said which of them it copies
    3. settled    the importer's copy is whole: this answer alone lets it use the copy
       expired    nobody renewed in time (from 1 or 2)
       released   nobody wants the blocks any more (from 1 or 2)

One way, and each call is one step without an await between check and change, so that of two calls
that race exactly one is told OK. ``on_end`` runs once, inside the step that ends the lease; no
other way leads blocks back to the pool. The table does no IO and knows no thread: its owner calls
it from one, gives it a clock, and calls ``expire_due`` after the renewals that already wait have
been handed in. Until then an overdue lease still answers: nothing was reused under it.
"""

import hmac
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from common.types import BlockRef, Epoch, Offer, WorkerId

log = logging.getLogger(__name__)

SECRET_BYTES = 16
LEASE_ID_BYTES = 16
# Whoever holds a lease renews it this often within its length.
RENEWALS_PER_LEASE = 3
# Ended leases whose verdict can still be told apart from `unknown`.
NUM_REMEMBERED = 4096


class LeaseState(StrEnum):
    OFFERED = "offered"
    CLAIMED = "claimed"
    SETTLED = "settled"
    EXPIRED = "expired"
    RELEASED = "released"


class LeaseVerdict(StrEnum):
    """Names are those of the enum of this name in proto/baton/v1/worker.proto."""

    OK = "ok"
    UNKNOWN = "unknown"
    EXPIRED = "expired"
    RELEASED = "released"
    SETTLED = "settled"
    TAKEN = "taken"
    STALE_EPOCH = "stale_epoch"
    STALE_ATTEMPT = "stale_attempt"
    BAD_SECRET = "bad_secret"
    BAD_BLOCKS = "bad_blocks"


@dataclass(frozen=True, slots=True)
class LeaseKey:
    """Names a lease and proves the right to it."""

    lease_id: str
    secret: bytes = field(repr=False)
    epoch: Epoch
    attempt: int

    @classmethod
    def of(cls, offer: Offer) -> "LeaseKey":
        return cls(offer.lease_id, offer.secret, offer.epoch, offer.attempt)


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    lease_id: str
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class LeaseEnd:
    """How a lease ended: ``state`` is settled, expired or released. ``claimed`` are the blocks
    that an importer asked for, () where nobody did."""

    lease_id: str
    state: LeaseState
    blocks: tuple[BlockRef, ...]
    claimed: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A live lease as ``/debug/kv`` shows it. ``claimer`` is its worker id, "" while offered."""

    lease_id: str
    state: LeaseState
    attempt: int
    blocks: tuple[BlockRef, ...]
    claimer: WorkerId
    age_s: float
    remaining_s: float


@dataclass(frozen=True, slots=True)
class LeaseStatistics:
    """``offered`` and ``claimed`` are live leases now; ``num_*`` count since the start;
    ``refused`` counts by (operation, verdict)."""

    offered: int
    claimed: int
    num_offered: int
    num_claimed: int
    num_settled: int
    num_expired: int
    num_released: int
    refused: Mapping[tuple[str, LeaseVerdict], int]


@dataclass(slots=True)
class _Lease:
    lease_id: str
    secret: bytes
    attempt: int
    blocks: tuple[BlockRef, ...]
    offered_s: float
    expires_s: float
    on_end: Callable[[LeaseEnd], None]
    state: LeaseState = LeaseState.OFFERED
    claimer: WorkerId = ""
    claimed: tuple[BlockRef, ...] = ()


@dataclass(frozen=True, slots=True)
class _Ended:
    """What is kept of an ended lease, to tell a late caller what happened."""

    secret: bytes
    attempt: int
    state: LeaseState


class LeaseTable:
    """Leases of one exporting worker in one epoch. ``clock`` is monotonic, in seconds."""

    def __init__(
        self,
        epoch: Epoch,
        lease_s: float,
        clock: Callable[[], float],
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.epoch = epoch
        self.lease_s = lease_s
        self._clock = clock
        self._random_bytes = random_bytes
        self._live: dict[str, _Lease] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._entered: Counter[LeaseState] = Counter()
        self._refused: Counter[tuple[str, LeaseVerdict]] = Counter()

    # ------------------------------------------------------------ the exporting worker

    def offer(
        self, blocks: Sequence[BlockRef], attempt: int, on_end: Callable[[LeaseEnd], None]
    ) -> LeaseGrant:
        """Holds ``blocks`` until the lease ends; ``on_end`` is then called, exactly once. What it
        raises is logged: the lease has ended all the same, and others are due behind it."""
        now = self._clock()
        lease = _Lease(
            lease_id=self._random_bytes(LEASE_ID_BYTES).hex(),
            secret=self._random_bytes(SECRET_BYTES),
            attempt=attempt,
            blocks=tuple(blocks),
            offered_s=now,
            expires_s=now + self.lease_s,
            on_end=on_end,
        )
        self._live[lease.lease_id] = lease
        self._entered[LeaseState.OFFERED] += 1
        return LeaseGrant(lease.lease_id, lease.secret)

    def next_expiry_s(self) -> float | None:
        """When, by the clock, the next live lease runs out; None where none lives."""
        return min((lease.expires_s for lease in self._live.values()), default=None)

    def expire_due(self) -> int:
        """Ends the leases that ran out; call it once waiting renewals have been handed in."""
        now = self._clock()
        due = [lease for lease in self._live.values() if lease.expires_s <= now]
        for lease in due:
            self._end(lease, LeaseState.EXPIRED)
        return len(due)

    def release_all(self) -> None:
        """The worker goes away: every live lease ends as released."""
        for lease in list(self._live.values()):
            self._end(lease, LeaseState.RELEASED)

    def claimed_blocks(self, lease_id: str) -> tuple[BlockRef, ...]:
        """Blocks that a live claimed lease is copied from; () for any other."""
        lease = self._live.get(lease_id)
        return lease.claimed if lease else ()

    def leases(self) -> tuple[LeaseInfo, ...]:
        now = self._clock()
        return tuple(
            LeaseInfo(
                lease_id=lease.lease_id,
                state=lease.state,
                attempt=lease.attempt,
                blocks=lease.blocks,
                claimer=lease.claimer,
                age_s=now - lease.offered_s,
                remaining_s=lease.expires_s - now,
            )
            for lease in self._live.values()
        )

    def statistics(self) -> LeaseStatistics:
        states = Counter(lease.state for lease in self._live.values())
        return LeaseStatistics(
            offered=states[LeaseState.OFFERED],
            claimed=states[LeaseState.CLAIMED],
            num_offered=self._entered[LeaseState.OFFERED],
            num_claimed=self._entered[LeaseState.CLAIMED],
            num_settled=self._entered[LeaseState.SETTLED],
            num_expired=self._entered[LeaseState.EXPIRED],
            num_released=self._entered[LeaseState.RELEASED],
            refused=dict(self._refused),
        )

    # ------------------------------------------------------------ gateways and importers

    def claim(
        self, key: LeaseKey, claimer_id: WorkerId, block_indices: Sequence[int]
    ) -> LeaseVerdict:
        """offered -> claimed, for one claimer. ``block_indices`` point into the offer's blocks:
        those that the claimer will copy, each once, at least one."""
        lease = self._find("claim", key)
        if isinstance(lease, LeaseVerdict):
            return lease
        if lease.state is LeaseState.CLAIMED:
            return self._refuse("claim", LeaseVerdict.TAKEN)
        if not _are_distinct_indices(block_indices, len(lease.blocks)):
            return self._refuse("claim", LeaseVerdict.BAD_BLOCKS)
        lease.state = LeaseState.CLAIMED
        lease.claimer = claimer_id
        lease.claimed = tuple(lease.blocks[index] for index in block_indices)
        lease.expires_s = self._clock() + self.lease_s
        self._entered[LeaseState.CLAIMED] += 1
        return LeaseVerdict.OK

    def renew(self, key: LeaseKey) -> LeaseVerdict:
        """A full lease from now on, for an offered or claimed one."""
        lease = self._find("renew", key)
        if isinstance(lease, LeaseVerdict):
            return lease
        lease.expires_s = self._clock() + self.lease_s
        return LeaseVerdict.OK

    def settle(self, key: LeaseKey) -> LeaseVerdict:
        """claimed -> settled. OK says: from claim to now none of the blocks was reused."""
        lease = self._find("settle", key)
        if isinstance(lease, LeaseVerdict):
            return lease
        if lease.state is not LeaseState.CLAIMED:
            return self._refuse("settle", LeaseVerdict.BAD_BLOCKS)
        self._end(lease, LeaseState.SETTLED)
        return LeaseVerdict.OK

    def release(self, key: LeaseKey) -> LeaseVerdict:
        """offered or claimed -> released."""
        lease = self._find("release", key)
        if isinstance(lease, LeaseVerdict):
            return lease
        self._end(lease, LeaseState.RELEASED)
        return LeaseVerdict.OK

    # ------------------------------------------------------------ inside

    def _find(self, operation: str, key: LeaseKey) -> _Lease | LeaseVerdict:
        """The live lease that ``key`` opens, or why it opens none (which is counted)."""
        if key.epoch != self.epoch:
            return self._refuse(operation, LeaseVerdict.STALE_EPOCH)
        lease: _Lease | _Ended | None = self._live.get(key.lease_id)
        lease = lease or self._ended.get(key.lease_id)
        if lease is None:
            return self._refuse(operation, LeaseVerdict.UNKNOWN)
        if not hmac.compare_digest(lease.secret, key.secret):
            return self._refuse(operation, LeaseVerdict.BAD_SECRET)
        if key.attempt != lease.attempt:
            return self._refuse(operation, LeaseVerdict.STALE_ATTEMPT)
        if isinstance(lease, _Ended):
            return self._refuse(operation, LeaseVerdict(lease.state))
        return lease

    def _refuse(self, operation: str, verdict: LeaseVerdict) -> LeaseVerdict:
        self._refused[operation, verdict] += 1
        return verdict

    def _end(self, lease: _Lease, state: LeaseState) -> None:
        del self._live[lease.lease_id]
        self._entered[state] += 1
        self._ended[lease.lease_id] = _Ended(lease.secret, lease.attempt, state)
        if len(self._ended) > NUM_REMEMBERED:
            self._ended.popitem(last=False)
        try:
            lease.on_end(LeaseEnd(lease.lease_id, state, lease.blocks, lease.claimed))
        except Exception:
            log.exception("the end of a lease was not taken note of")


def _are_distinct_indices(indices: Sequence[int], length: int) -> bool:
    in_range = all(0 <= index < length for index in indices)
    return in_range and 0 < len(indices) == len(set(indices))
