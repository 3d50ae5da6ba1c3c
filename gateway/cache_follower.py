"""Keeps the prefix index in step with the workers' caches: hears their events, asks for snapshots.

At most one snapshot a worker is asked for at a time; where none comes, again after `RETRY_S`,
until the worker has left or the index is in step.
"""

import asyncio
import logging

from google.protobuf.message import DecodeError

from common.bus import KV_EVENT_SUBJECTS, Bus, BusError, Message, kv_snapshot_subject
from common.wire import worker as wire
from gateway.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 2.0
RETRY_S = 1.0


class CacheFollower:
    """Owns the tasks that ask. `report` and `leave` follow the registry."""

    def __init__(self, bus: Bus, index: PrefixIndex) -> None:
        self._bus = bus
        self._index = index
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        await self._bus.subscribe(KV_EVENT_SUBJECTS, self._on_events)

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def report(self, report: wire.WorkerReport) -> None:
        """Of a worker that the registry has."""
        if self._index.report(report.worker_id, report.epoch, report.load.kv_events):
            self._ask(report.worker_id)

    def leave(self, worker_id: str) -> None:
        self._index.leave(worker_id)
        if (task := self._asking.pop(worker_id, None)) is not None:
            task.cancel()

    def reconnected(self) -> None:
        for worker_id in self._index.lose_step():
            self._ask(worker_id)

    async def _on_events(self, message: Message) -> None:
        worker_id = message.subject.rpartition(".")[2]
        try:
            events = wire.KvEvents.FromString(message.data)
        except DecodeError:
            return
        if self._index.events(worker_id, events):
            self._ask(worker_id)

    def _ask(self, worker_id: str) -> None:
        if worker_id not in self._asking:
            task = asyncio.get_running_loop().create_task(self._until_in_step(worker_id))
            self._asking[worker_id] = task

    async def _until_in_step(self, worker_id: str) -> None:
        try:
            while True:
                if not await self._wants_another(worker_id):
                    return
                await asyncio.sleep(RETRY_S)
        finally:
            if self._asking.get(worker_id) is asyncio.current_task():
                del self._asking[worker_id]

    async def _wants_another(self, worker_id: str) -> bool:
        request = wire.KvSnapshotRequest().SerializeToString()
        subject = kv_snapshot_subject(worker_id)
        try:
            data = await self._bus.request(subject, request, SNAPSHOT_TIMEOUT_S)
            snapshot = wire.KvSnapshot.FromString(data)
        except (BusError, DecodeError) as error:
            log.debug("no snapshot of %s: %s", worker_id, error)
            return self._index.epoch(worker_id) is not None
        if snapshot.epoch != self._index.epoch(worker_id):
            # Of a life that we have not heard of yet, or not any more: its report asks again.
            return False
        return self._index.snapshot(worker_id, snapshot)
