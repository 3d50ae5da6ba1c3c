"""The exporting side of a hand-off, for a worker: its pool, its leases and the ways to reach them.

The life of an offer::

    1. offer()    checksums of the blocks (transfer thread), then a lease; the Offer goes into the
                  ticket. The worker's engine holds the blocks until ``on_end``.
    2. claim()    by the importer, through KVTransferService: the chosen transport may serve the
                  claimed blocks from here on
    3. settle(), release(), or nobody renews: the lease ends, the transport stops serving, and
                  ``on_end`` tells the worker to take its blocks back

Everything but the checksums runs on the event loop that called ``start``, so that no call sees
another one's half-done change.
"""

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.errors import InvalidRequest
from common.types import BlockRef, Offer, WorkerId
from kv_transfer.base import KVExporter, LeaseProof, Peer
from kv_transfer.lease import (
    RENEWALS_PER_LEASE,
    LeaseEnd,
    LeaseInfo,
    LeaseKey,
    LeaseState,
    LeaseStatistics,
    LeaseTable,
    LeaseVerdict,
)
from kv_transfer.memory import PoolMemory
from kv_transfer.transfers import TransferRunner

log = logging.getLogger(__name__)

# Given to renewals that wait in the server's queues before an overdue lease is judged.
_DRAIN_S = 0.05
# A timer later than this share of a lease means that this process stood still: everything that was
# sent to it meanwhile still waits, and peers may have stood still with it.
_FROZEN_SHARE = 0.1

OnEnd = Callable[[LeaseEnd], None]


@dataclass(frozen=True, slots=True)
class ExportStatistics:
    """``num_bytes`` and ``num_blocks``: settled, by transport. ``num_strangers``: turned away at
    data ports."""

    leases: LeaseStatistics
    num_blocks: Mapping[str, int]
    num_bytes: Mapping[str, int]
    num_strangers: int


class Exports:
    """One worker's offers in one epoch; made and used inside the running event loop.

    ``endpoint`` is where its KVTransferService listens. Closing it closes the exporters; the pool
    and the transfer runner stay the caller's. ``on_end`` callbacks must not raise.
    """

    def __init__(
        self,
        pool: PoolMemory,
        exporters: Mapping[str, KVExporter],
        transfers: TransferRunner,
        endpoint: str,
        lease_s: float,
    ) -> None:
        self.endpoint = endpoint
        self._pool = pool
        self._exporters = dict(exporters)
        self._transfers = transfers
        self._clock = asyncio.get_running_loop().time
        self._table = LeaseTable(pool.epoch, lease_s, self._clock)
        self._transport_of: dict[str, str] = {}
        self._some = asyncio.Event()
        self._none = asyncio.Event()
        self._none.set()
        self._timer: asyncio.Task[None] | None = None
        self._num_blocks: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()

    async def start(self) -> None:
        self._timer = asyncio.create_task(self._expire(), name="lease-expiry")

    async def wait_none(self) -> None:
        """Waits until every offer is settled, released or expired."""
        await self._none.wait()

    async def close(self) -> None:
        """Ends what still lives as released, each with its ``on_end``."""
        if self._timer is not None:
            self._timer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._timer
        self._table.release_all()
        for exporter in self._exporters.values():
            exporter.close()

    # ------------------------------------------------------------ for the worker

    async def offer(
        self, blocks: Sequence[BlockRef], num_tokens: int, attempt: int, on_end: OnEnd
    ) -> Offer:
        """Puts ``blocks``, the KV of a sequence's first ``num_tokens`` tokens, under a lease.

        ``on_end`` is called once, on this loop, when the blocks may go back to the pool. Where
        this raises or is cancelled it is never called and the blocks are still the caller's.
        """
        exporter = next(iter(self._exporters.values()))
        sealed = self._transfers.submit(functools.partial(exporter.seal, tuple(blocks)))
        checksums = await asyncio.wrap_future(sealed)
        grant = self._table.offer(blocks, attempt, functools.partial(self._ended, on_end))
        self._none.clear()
        self._some.set()
        return Offer(
            lease_id=grant.lease_id,
            secret=grant.secret,
            worker_id=self._pool.worker_id,
            epoch=self._pool.epoch,
            attempt=attempt,
            endpoint=self.endpoint,
            blocks=tuple(blocks),
            checksums=checksums,
            num_tokens=num_tokens,
            lease_s=self._table.lease_s,
            layout=self._pool.layout,
        )

    def leases(self) -> tuple[LeaseInfo, ...]:
        return self._table.leases()

    def statistics(self) -> ExportStatistics:
        return ExportStatistics(
            leases=self._table.statistics(),
            num_blocks=dict(self._num_blocks),
            num_bytes=dict(self._num_bytes),
            num_strangers=sum(exporter.num_strangers for exporter in self._exporters.values()),
        )

    # ------------------------------------------------------------ for KVTransferService

    @property
    def lease_s(self) -> float:
        return self._table.lease_s

    def describe(self) -> Peer:
        """This worker as its Hello tells it to importers."""
        return Peer(
            worker_id=self._pool.worker_id,
            epoch=self._pool.epoch,
            layout=self._pool.layout,
            num_blocks=self._pool.num_blocks,
            addresses=tuple(exporter.address() for exporter in self._exporters.values()),
        )

    def claim(
        self, key: LeaseKey, claimer_id: WorkerId, block_indices: Sequence[int], transport: str
    ) -> LeaseVerdict:
        """Raises InvalidRequest for a transport that is not among `describe`'s addresses."""
        exporter = self._exporters.get(transport)
        if exporter is None:
            raise InvalidRequest("transport", f"must be one of {', '.join(self._exporters)}")
        verdict = self._table.claim(key, claimer_id, block_indices)
        if verdict is LeaseVerdict.OK:
            self._transport_of[key.lease_id] = transport
            proof = LeaseProof(key.lease_id, key.secret)
            exporter.send(proof, self._table.claimed_blocks(key.lease_id))
        return verdict

    def renew(self, keys: Sequence[LeaseKey]) -> tuple[LeaseVerdict, ...]:
        return tuple(self._table.renew(key) for key in keys)

    def settle(self, key: LeaseKey) -> LeaseVerdict:
        return self._table.settle(key)

    def release(self, key: LeaseKey) -> LeaseVerdict:
        """Also what the worker itself calls when nobody took its ticket."""
        return self._table.release(key)

    # ------------------------------------------------------------ inside

    def _ended(self, on_end: OnEnd, end: LeaseEnd) -> None:
        """The blocks go back to the pool whatever becomes of the transport."""
        try:
            self._close_way(end)
        finally:
            if self._table.next_expiry_s() is None:
                self._some.clear()
                self._none.set()
            on_end(end)

    def _close_way(self, end: LeaseEnd) -> None:
        transport = self._transport_of.pop(end.lease_id, None)
        if transport is not None:
            if end.state is LeaseState.SETTLED:
                self._num_blocks[transport] += len(end.claimed)
                self._num_bytes[transport] += len(end.claimed) * self._pool.layout.block_bytes
            self._exporters[transport].revoke(end.lease_id)

    async def _expire(self) -> None:
        """Ends leases as they run out. All leases are equally long, so none offered later than
        the one this waits for can run out before it."""
        while True:
            due_s = self._table.next_expiry_s()
            if due_s is None:
                await self._some.wait()
                continue
            await asyncio.sleep(max(0.0, due_s - self._clock()))
            late_s = self._clock() - due_s
            frozen = late_s > _FROZEN_SHARE * self.lease_s
            await asyncio.sleep(self.lease_s / RENEWALS_PER_LEASE if frozen else _DRAIN_S)
            num_expired = self._table.expire_due()
            if num_expired:
                log.warning("%d leases expired unrenewed", num_expired)
