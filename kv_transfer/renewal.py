"""Keeps claimed leases alive while their blocks are being copied: one call an exporter, not one a
lease, every third of a lease."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import PeerLost
from common.failpoints import DROP, hit_async
from kv_transfer.lease import RENEWALS_PER_LEASE, LeaseKey, LeaseVerdict

# Whatever lease an exporter says that it gave.
MIN_INTERVAL_S = 0.1


class RenewCall(Protocol):
    async def renew(self, endpoint: str, keys: Sequence[LeaseKey]) -> tuple[LeaseVerdict, ...]: ...


@dataclass(frozen=True, slots=True)
class _Held:
    key: LeaseKey
    on_lost: Callable[[LeaseVerdict], None]


class Renewer:
    """One task for each exporter of which leases are held; it ends when there are none."""

    def __init__(self, control: RenewCall) -> None:
        self._control = control
        self._held: dict[str, dict[str, _Held]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def hold(
        self,
        endpoint: str,
        key: LeaseKey,
        lease_s: float,
        on_lost: Callable[[LeaseVerdict], None],
    ) -> None:
        """Renews from now on; ``on_lost`` gets the verdict should the exporter refuse."""
        self._held.setdefault(endpoint, {})[key.lease_id] = _Held(key, on_lost)
        if endpoint not in self._tasks:
            interval_s = max(lease_s / RENEWALS_PER_LEASE, MIN_INTERVAL_S)
            renewing = self._renew(endpoint, interval_s)
            self._tasks[endpoint] = asyncio.create_task(renewing, name="kv-renew")

    def drop(self, endpoint: str, lease_id: str) -> None:
        self._held[endpoint].pop(lease_id, None)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _renew(self, endpoint: str, interval_s: float) -> None:
        try:
            while True:
                await asyncio.sleep(interval_s)
                held = dict(self._held[endpoint])
                if not held:
                    return
                if await hit_async("decode.before_renew") == DROP:
                    continue
                try:
                    keys = [entry.key for entry in held.values()]
                    verdicts = await self._control.renew(endpoint, keys)
                except PeerLost:
                    continue  # the lease may outlive this; what counts is the answer to settle
                for entry, verdict in zip(held.values(), verdicts, strict=True):
                    if (
                        verdict is not LeaseVerdict.OK
                        and entry.key.lease_id in self._held[endpoint]
                    ):
                        entry.on_lost(verdict)
        finally:
            del self._tasks[endpoint], self._held[endpoint]
