"""Tells the gateways that this worker is here: each second, at each change, and when asked.

A gateway expires a worker 3 s after its last report and compares the attempts in it with those it
granted, so a report says everything anew. A report that cannot be sent is worth nothing later: it
is dropped, and the next one is at most a second away.
"""

import asyncio
import logging
from collections.abc import Callable

from common import failpoints
from common.bus import DISCOVER_SUBJECT, Bus, BusError, Message, report_subject
from common.types import WorkerId
from common.wire import worker as wire

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
# Changes within this time share one report.
DEBOUNCE_S = 0.05


class Registration:
    """``describe`` makes the report of now; called on the event loop, once a report."""

    def __init__(
        self, bus: Bus, worker_id: WorkerId, describe: Callable[[], wire.WorkerReport]
    ) -> None:
        self._bus = bus
        self._subject = report_subject(worker_id)
        self._describe = describe
        self._changed = asyncio.Event()
        self._num_sent = 0
        self._num_unsent = 0

    @property
    def num_sent(self) -> int:
        return self._num_sent

    @property
    def num_unsent(self) -> int:
        return self._num_unsent

    def changed(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        await self._bus.subscribe(DISCOVER_SUBJECT, self._asked)
        while True:
            await self.report()
            try:
                async with asyncio.timeout(REPORT_INTERVAL_S):
                    await self._changed.wait()
                    await asyncio.sleep(DEBOUNCE_S)
            except TimeoutError:
                pass
            self._changed.clear()

    async def report(self) -> None:
        if await failpoints.hit_async("worker.report") == failpoints.DROP:
            return
        try:
            await self._bus.publish(self._subject, self._describe().SerializeToString())
            self._num_sent += 1
        except BusError as error:
            self._num_unsent += 1
            log.debug("report not sent: %s", error)

    async def _asked(self, _: Message) -> None:
        await self.report()
