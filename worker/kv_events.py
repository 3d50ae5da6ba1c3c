"""Tells the gateways which prefixes this worker has cached.

1. After a step that changed the cache, and `COALESCE_S` more, the net changes since the last
   message go out on `baton.kv.<worker>`, numbered 1, 2, 3, ... within the worker's epoch. Nothing
   is sent, and nothing runs, while nothing changes.
2. A message that cannot be sent is lost with its number: gateways see the gap, at the latest in
   the next report, which carries the last number.
3. A gateway that starts, or saw a gap, asks for a snapshot: all cached keys as after one number.
   Changes and snapshot are taken between the same two steps, so that none falls in between.
"""

import asyncio
import logging
from collections.abc import Sequence

from common.bus import Bus, BusError, Message, kv_events_subject, kv_snapshot_subject
from common.wire import worker as wire
from engine.block_events import BlockEvents
from engine.engine import Engine
from engine.loop import EngineRuntime
from worker.identity import WorkerIdentity

log = logging.getLogger(__name__)

COALESCE_S = 0.05


class KvEventPublisher:
    """``changed`` is to be called after each step; `run` does the rest."""

    def __init__(self, bus: Bus, identity: WorkerIdentity, runtime: EngineRuntime) -> None:
        self._bus = bus
        self._identity = identity
        self._runtime = runtime
        self._changed = asyncio.Event()
        # Numbers and messages go out in one order.
        self._lock = asyncio.Lock()
        self._number = 0

    @property
    def number(self) -> int:
        """Of the last message."""
        return self._number

    def changed(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        await self._bus.subscribe(kv_snapshot_subject(self._identity.worker_id), self._asked)
        while True:
            await self._changed.wait()
            await asyncio.sleep(COALESCE_S)
            self._changed.clear()
            async with self._lock:
                await self._publish(await self._runtime.call(Engine.take_block_events))

    async def _asked(self, message: Message) -> None:
        async with self._lock:
            events, keys = await self._runtime.call(_take_all)
            await self._publish(events)
            snapshot = wire.KvSnapshot(epoch=self._identity.epoch, number=self._number, keys=keys)
        try:
            await message.reply(snapshot.SerializeToString())
        except BusError as error:
            log.debug("snapshot not sent: %s", error)

    async def _publish(self, events: BlockEvents) -> None:
        if not (events.stored or events.removed or events.reset):
            return
        self._number += 1
        message = wire.KvEvents(
            epoch=self._identity.epoch,
            number=self._number,
            stored=events.stored,
            removed=events.removed,
            reset=events.reset,
        )
        subject = kv_events_subject(self._identity.worker_id)
        try:
            await self._bus.publish(subject, message.SerializeToString())
        except BusError as error:
            log.debug("block events not sent: %s", error)


def _take_all(engine: Engine) -> tuple[BlockEvents, Sequence[int]]:
    return engine.take_block_events(), engine.cached_keys()
