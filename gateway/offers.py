"""The gateway's part in a lease: renew an offer until its claimer does, release what nobody wants.

Between the ticket and the claim the offer belongs to nobody but the gateway: a decode worker that
is one block short waits, and the lease must not run out meanwhile.
"""

import asyncio
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from typing import Protocol

from common.errors import BatonError
from common.failpoints import DROP, hit_async
from common.wire import worker as wire

# Whatever lease a worker says that it gave.
_MIN_RENEWAL_S = 0.1


class OfferClient(Protocol):
    """The exporter's KVTransferService, as far as a gateway uses it."""

    async def renew(self, offer: wire.Offer) -> bool:
        """False: it is not ours to renew any more."""
        ...

    async def release(self, offer: wire.Offer) -> None: ...

    def keep(self, endpoints: Set[str]) -> None:
        """No worker has any other endpoint."""
        ...


class OfferKeeper:
    """Owns the tasks that renew and release."""

    def __init__(self, client: OfferClient) -> None:
        self._client = client
        self._releases: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def kept(self, offer: wire.Offer) -> AsyncIterator[None]:
        """Renews while the block runs, until it is claimed."""
        renewing = asyncio.get_running_loop().create_task(self._renew(offer))
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    async def _renew(self, offer: wire.Offer) -> None:
        while True:
            await asyncio.sleep(max(offer.lease_ms / 3000, _MIN_RENEWAL_S))
            if await hit_async("gateway.before_renew") == DROP:
                continue
            try:
                if not await self._client.renew(offer):
                    return
            except BatonError:
                # The next one may get through; if none does, the lease runs out and the claim
                # is refused: the attempt ends as kv_lost.
                continue

    def release(self, offer: wire.Offer) -> None:
        """Gives the blocks back in the background; if that fails the lease runs out by itself."""
        task = asyncio.get_running_loop().create_task(self._release(offer))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, offer: wire.Offer) -> None:
        try:
            await self._client.release(offer)
        except BatonError:
            return

    async def close(self) -> None:
        """Lets releases under way finish."""
        await asyncio.gather(*self._releases, return_exceptions=True)


def lease_key(offer: wire.Offer) -> wire.LeaseKey:
    return wire.LeaseKey(
        lease_id=offer.lease_id, secret=offer.secret, epoch=offer.epoch, attempt=offer.attempt
    )
