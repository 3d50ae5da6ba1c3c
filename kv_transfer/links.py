"""Which exporters this worker fetches from just now, and by what way.

A link is opened at the first fetch from a worker's epoch (Hello, layout compared, transport
chosen, pool opened) and dropped when the worker is lost or nothing was fetched for a while: the
mapping of a dead worker's pool would otherwise keep its memory. Where a worker fell silent in
a fetch, the next one opens another link: its Hello, not the transfer thread, waits for an answer.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from common.errors import LeaseRefused, PeerLost
from common.types import Epoch, KVLayout, Offer, WorkerId
from kv_transfer.base import (
    BlockCopy,
    CancelFlag,
    FetchResult,
    HostIdentity,
    KVImporter,
    LeaseProof,
    Peer,
)
from kv_transfer.layout import require_compatible
from kv_transfer.lease import LeaseKey, LeaseVerdict
from kv_transfer.registry import Choice, choose
from kv_transfer.transfers import TransferRunner

log = logging.getLogger(__name__)

# An exporter that nothing was fetched from for so long is forgotten, and greeted again if need be.
IDLE_S = 60.0


class KVControl(Protocol):
    """What an importer asks exporters over the network; each call is bounded in time and raises
    PeerLost where no answer came. `kv_transfer.control.GrpcKVControl` is the real one."""

    async def hello(self, endpoint: str) -> tuple[Peer, HostIdentity]: ...

    async def claim(
        self, endpoint: str, key: LeaseKey, block_indices: Sequence[int], transport: str
    ) -> LeaseVerdict: ...

    async def renew(self, endpoint: str, keys: Sequence[LeaseKey]) -> tuple[LeaseVerdict, ...]: ...

    async def settle(self, endpoint: str, key: LeaseKey) -> LeaseVerdict: ...

    async def release(self, endpoint: str, key: LeaseKey) -> LeaseVerdict: ...

    async def forget(self, endpoint: str) -> None:
        """Nothing more is asked there for now: close the connection."""


class LinkImporter:
    """An importer as one link uses it, on the transfer thread. Fetches that wait there behind one
    in which the peer fell silent end at once: each would bear the same silence again, and hold up
    the hand-offs from all others."""

    def __init__(self, importer: KVImporter) -> None:
        self._importer = importer
        self.silent = False

    def fetch(
        self, peer: Peer, proof: LeaseProof, copies: Sequence[BlockCopy], cancel: CancelFlag
    ) -> FetchResult:
        """As `KVImporter.fetch`."""
        if self.silent:
            raise PeerLost("an exporter fell silent in a fetch before this one")
        try:
            return self._importer.fetch(peer, proof, copies, cancel)
        except PeerLost as error:
            # One that hung up is not lost to others: the lease may have ended, or the connection.
            if isinstance(error.__cause__, TimeoutError):
                self.silent = True
                self._importer.forget(peer.worker_id, peer.epoch)
            raise

    def forget(self, peer: Peer) -> None:
        self._importer.forget(peer.worker_id, peer.epoch)


@dataclass(slots=True)
class Link:
    """``num_fetches`` are under way and keep the link open."""

    peer: Peer
    endpoint: str
    choice: Choice
    importer: LinkImporter
    last_used_s: float
    num_fetches: int = 0


class Links:
    """Owned by `Imports`, which says when a fetch begins and ends."""

    def __init__(
        self,
        layout: KVLayout,
        importers: Mapping[str, KVImporter],
        transfers: TransferRunner,
        control: KVControl,
        host: HostIdentity,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._importers = dict(importers)
        self._transfers = transfers
        self._control = control
        self._host = host
        self._clock = clock
        self._opening: dict[tuple[WorkerId, Epoch], asyncio.Task[Link]] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep(), name="kv-links")

    async def close(self) -> None:
        tasks = [*self._opening.values(), *([self._sweeper] if self._sweeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for importer in self._importers.values():
            await asyncio.wrap_future(self._transfers.submit(importer.close))

    async def use(self, offer: Offer) -> Link:
        """The way to the offer's worker in its epoch, opened once whoever asks first. Raises
        PeerLost, LayoutMismatch, or LeaseRefused where another epoch answers."""
        name = (offer.worker_id, offer.epoch)
        if name not in self._opening or _fell_silent(self._opening[name]):
            self._opening[name] = asyncio.create_task(self._open(offer), name="kv-connect")
        task = self._opening[name]
        # Waited for, not awaited: a caller that is cancelled leaves it to the others.
        await asyncio.wait({task})
        if task.cancelled() or task.exception() is not None:
            # Whatever it was, the next fetch tries anew.
            if self._opening.get(name) is task:
                del self._opening[name]
                await self._control.forget(offer.endpoint)
            if task.cancelled():
                raise PeerLost("the way to an exporter was closed while it was opened")
        link = task.result()
        link.num_fetches += 1
        return link

    def unuse(self, link: Link) -> None:
        link.num_fetches -= 1
        link.last_used_s = self._clock()

    def open_links(self) -> list[Link]:
        return [task.result() for task in self._opening.values() if _is_open(task)]

    async def forget(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Drops the mapping and the connections of a worker that nobody fetches from."""
        for link in self.open_links():
            named = (link.peer.worker_id, link.peer.epoch) == (worker_id, epoch)
            if named and not link.num_fetches:
                del self._opening[worker_id, epoch]
                call = partial(link.importer.forget, link.peer)
                await asyncio.wrap_future(self._transfers.submit(call))
                await self._control.forget(link.endpoint)

    async def _open(self, offer: Offer) -> Link:
        peer, host = await self._control.hello(offer.endpoint)
        if (peer.worker_id, peer.epoch) != (offer.worker_id, offer.epoch):
            raise LeaseRefused(LeaseVerdict.STALE_EPOCH)
        require_compatible(self._layout, peer.layout)
        call = partial(choose, self._importers, peer, same_host=host.shares_memory_with(self._host))
        choice = await asyncio.wrap_future(self._transfers.submit(call))
        log.info("KV of %s comes by %s: %s", peer.worker_id, choice.transport, choice.reason)
        importer = LinkImporter(self._importers[choice.transport])
        return Link(peer, offer.endpoint, choice, importer, self._clock())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(IDLE_S / 2)
            for link in self.open_links():
                if self._clock() - link.last_used_s > IDLE_S:
                    await self.forget(link.peer.worker_id, link.peer.epoch)


def _is_open(task: asyncio.Task[Link]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _fell_silent(task: asyncio.Task[Link]) -> bool:
    return _is_open(task) and task.result().importer.silent
