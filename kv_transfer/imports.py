"""The importing side of a hand-off, for a worker: claim, copy, settle.

The life of a fetch::

    1. Hello      once per exporter and epoch: layout compared, transport chosen, pool opened
    2. claim      offered -> claimed, naming the blocks that this pool does not hold already
    3. copy       on the transfer thread, each block checked right after its copy; meanwhile the
                  lease is renewed, all of one exporter's leases in one call
    4. settle     only an OK makes the copy usable: the exporter says that it reused nothing
       release    where anything before went wrong

Until `Imports.fetch` returns or raises, the target blocks are *importing*: a copy may be writing
them. It therefore ends only after the copy has really returned, also when it is cancelled.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from common.errors import LeaseRefused, PeerLost, TransferCancelled, TransferError
from common.failpoints import hit_async
from common.types import BlockMove, Offer, WorkerId
from kv_transfer.base import (
    BlockCopy,
    CancelFlag,
    FetchResult,
    HostIdentity,
    KVImporter,
    LeaseProof,
)
from kv_transfer.copying import go_on
from kv_transfer.layout import NO_CHECKSUM, require_compatible
from kv_transfer.lease import LeaseKey, LeaseVerdict
from kv_transfer.links import KVControl, Link, Links
from kv_transfer.memory import PoolMemory
from kv_transfer.registry import Choice
from kv_transfer.renewal import Renewer
from kv_transfer.transfers import TransferRunner

log = logging.getLogger(__name__)

# How long the end of a fetch waits for an answer to its release.
_RELEASE_S = 1.0


@dataclass(frozen=True, slots=True)
class ImportStatistics:
    """Blocks, bytes and ``seconds`` (of their copies) are of settled fetches, by transport;
    failures by transport ("none" before there was one) and name of the error; ``links`` maps each
    exporter spoken to lately to its transport and why that one."""

    fetching: int
    num_fetches: int
    num_blocks: Mapping[str, int]
    num_bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    num_failures: Mapping[tuple[str, str], int]
    links: Mapping[WorkerId, Choice]


class Imports:
    """Fetches into one pool; made and used inside the running event loop.

    ``importers`` are the transports this worker can read by, best first. Closing it closes them;
    the pool and the transfer runner stay the caller's.
    """

    def __init__(
        self,
        pool: PoolMemory,
        importers: Mapping[str, KVImporter],
        transfers: TransferRunner,
        control: KVControl,
        host: HostIdentity,
    ) -> None:
        self._pool = pool
        self._transfers = transfers
        self._control = control
        clock = asyncio.get_running_loop().time
        self._links = Links(pool.layout, importers, transfers, control, host, clock)
        self._renewer = Renewer(control)
        self._fetches: dict[asyncio.Task[FetchResult], CancelFlag] = {}
        self._num_fetches = 0
        self._num_blocks: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._num_failures: Counter[tuple[str, str]] = Counter()

    async def start(self) -> None:
        await self._links.start()

    async def close(self) -> None:
        """Calls off what is under way and waits for it to end."""
        for cancel in self._fetches.values():
            cancel.set()
        if self._fetches:
            await asyncio.wait(self._fetches)
        await self._renewer.close()
        await self._links.close()

    def statistics(self) -> ImportStatistics:
        return ImportStatistics(
            fetching=len(self._fetches),
            num_fetches=self._num_fetches,
            num_blocks=dict(self._num_blocks),
            num_bytes=dict(self._num_bytes),
            seconds=dict(self._seconds),
            num_failures=dict(self._num_failures),
            links={link.peer.worker_id: link.choice for link in self._links.open_links()},
        )

    # ------------------------------------------------------------ for the worker

    def reason(self, worker_id: WorkerId) -> str:
        """Why blocks of that worker come the way they do; "" where nothing comes from it."""
        links = (link for link in self._links.open_links() if link.peer.worker_id == worker_id)
        return next((link.choice.reason for link in links), "")

    async def fetch(self, offer: Offer, moves: Sequence[BlockMove]) -> FetchResult:
        """Copies ``moves`` of ``offer`` into the pool and settles; only a return makes them usable.

        Raises a TransferError for anything that went wrong out there (the gateway is then told
        `kv_lost`). When it raises, or is cancelled, no copy runs any more and the lease has been
        given up: the targets may be freed at once, and must not be used.
        Without moves nothing is copied and the lease is just given back.
        """
        cancel = CancelFlag()
        task = asyncio.create_task(self._counted(offer, moves, cancel), name="kv-fetch")
        self._fetches[task] = cancel
        try:
            return await _returned(task, cancel)
        finally:
            del self._fetches[task]

    async def release(self, offer: Offer) -> None:
        """Gives up an offer, best effort: unanswered, its lease runs out by itself."""
        try:
            async with asyncio.timeout(_RELEASE_S):
                await self._control.release(offer.endpoint, LeaseKey.of(offer))
        except (TimeoutError, PeerLost) as error:
            log.info("release of a lease at %s went unanswered: %r", offer.worker_id, error)

    # ------------------------------------------------------------ one fetch

    async def _counted(
        self, offer: Offer, moves: Sequence[BlockMove], cancel: CancelFlag
    ) -> FetchResult:
        try:
            result = await self._fetch(offer, moves, cancel)
        except TransferError as error:
            self._num_failures[self._transport_to(offer), type(error).__name__] += 1
            if not isinstance(error, LeaseRefused):
                await self.release(offer)
            if isinstance(error, PeerLost):
                await self._links.forget(offer.worker_id, offer.epoch)
            raise
        self._num_fetches += 1
        if result.num_blocks:  # else no transport was used
            self._num_blocks[result.transport] += result.num_blocks
            self._num_bytes[result.transport] += result.num_bytes
            self._seconds[result.transport] += result.duration_s
        return result

    def _transport_to(self, offer: Offer) -> str:
        worker = (offer.worker_id, offer.epoch)
        for link in self._links.open_links():
            if (link.peer.worker_id, link.peer.epoch) == worker:
                return link.choice.transport
        return "none"

    async def _fetch(
        self, offer: Offer, moves: Sequence[BlockMove], cancel: CancelFlag
    ) -> FetchResult:
        copies = self._plan(offer, moves)
        if not copies:
            await self.release(offer)
            return FetchResult(num_blocks=0, num_bytes=0, duration_s=0.0, transport="")
        link = await self._links.use(offer)
        try:
            await hit_async("decode.before_claim")
            go_on(cancel)
            key = LeaseKey.of(offer)
            indices = [move.index for move in moves]
            transport = link.choice.transport
            _require_ok(await self._control.claim(offer.endpoint, key, indices, transport))
            return await self._claimed(link, offer, copies, cancel)
        finally:
            self._links.unuse(link)

    async def _claimed(
        self, link: Link, offer: Offer, copies: Sequence[BlockCopy], cancel: CancelFlag
    ) -> FetchResult:
        """From claim to settle, the lease renewed all the while."""
        refusals: list[LeaseVerdict] = []

        def lost(verdict: LeaseVerdict) -> None:
            refusals.append(verdict)
            cancel.set()

        key = LeaseKey.of(offer)
        proof = LeaseProof(offer.lease_id, offer.secret)
        call = partial(link.importer.fetch, link.peer, proof, copies, cancel)
        self._renewer.hold(offer.endpoint, key, offer.lease_s, lost)
        try:
            await hit_async("decode.after_claim")
            result = await _returned(asyncio.wrap_future(self._transfers.submit(call)), cancel)
            await hit_async("decode.before_settle")
            go_on(cancel)
            _require_ok(await self._control.settle(offer.endpoint, key))
        except TransferCancelled:
            if refusals:
                raise LeaseRefused(refusals[0]) from None
            raise
        finally:
            self._renewer.drop(offer.endpoint, offer.lease_id)
        await hit_async("decode.after_settle")
        return result

    def _plan(self, offer: Offer, moves: Sequence[BlockMove]) -> tuple[BlockCopy, ...]:
        require_compatible(self._pool.layout, offer.layout)
        checked = offer.layout.checksum != NO_CHECKSUM
        if len(offer.checksums) != (len(offer.blocks) if checked else 0):
            raise TransferError("the offer's checksums do not match its blocks")
        if any(not 0 <= move.index < len(offer.blocks) for move in moves):
            raise TransferError("the offer has fewer blocks than the sequence needs")
        return tuple(
            BlockCopy(
                index=move.index,
                source=offer.blocks[move.index],
                target=move.target,
                checksum=offer.checksums[move.index] if checked else None,
            )
            for move in moves
        )


async def _returned(future: asyncio.Future[FetchResult], cancel: CancelFlag) -> FetchResult:
    """The outcome of ``future``, waited for to its end: being cancelled only sets ``cancel``."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancel.set()
            cancelled = error
    if cancelled is not None:
        future.exception()  # of no interest now, and so marked as seen
        raise cancelled
    return future.result()


def _require_ok(verdict: LeaseVerdict) -> None:
    if verdict is not LeaseVerdict.OK:
        raise LeaseRefused(verdict)
