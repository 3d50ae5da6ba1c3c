"""Where jobs come in, when the room that was there a moment ago has gone."""

import asyncio
from collections.abc import Mapping

import pytest

from common.bus import Handler
from common.bus import Job as Delivery
from common.wire import worker as wire
from prefill_worker.intake import Ack, Intake
from prefill_worker.job import Job
from tests.worker.rig import prompt, state_of


class QueueOfOne:
    """A queue with one job, which a nak puts back at once, as NATS does."""

    connected = True
    connected_for_s = 60.0

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._queued = True
        self.num_deliveries = 0

    async def subscribe(self, subject: str, handler: Handler) -> None: ...

    async def fetch_job(self, timeout_s: float) -> Delivery | None:
        await asyncio.sleep(0)
        if not self._queued:
            await asyncio.sleep(timeout_s)
            return None
        self._queued = False
        self.num_deliveries += 1
        headers: Mapping[str, str] = {}
        return Delivery(self._data, headers, self.num_deliveries, self._settled, self._back)

    async def _settled(self) -> None: ...

    async def _back(self) -> None:
        self._queued = True


class Taker:
    """Has room until the first job has come; told of it only by being asked."""

    def __init__(self, bus: QueueOfOne) -> None:
        self._bus = bus
        self.has_room_again = False
        self.taken: list[Job] = []

    @property
    def has_free_slot(self) -> bool:
        return self._bus.num_deliveries == 0 or self.has_room_again

    def knows(self, key: tuple[str, int]) -> bool:
        return False

    def take(self, job: Job, ack: Ack) -> None:
        self.taken.append(job)

    def cancel(self, request_id: str, attempt: int) -> None: ...


@pytest.mark.fault("F13")
async def test_a_job_given_back_for_want_of_room_is_not_pulled_again_before_there_is_room() -> None:
    state = state_of("request", 1, prompt(20))
    bus = QueueOfOne(wire.PrefillJob(sequence=state, gateway_id="gw-1").SerializeToString())
    taker = Taker(bus)
    intake = Intake(bus, "prefill-1", taker)
    running = asyncio.create_task(intake.run())
    for _ in range(100):
        await asyncio.sleep(0)
    assert (bus.num_deliveries, intake.num_returned, taker.taken) == (1, 1, [])
    taker.has_room_again = True
    intake.slot_changed()
    async with asyncio.timeout(5):
        while not taker.taken:
            await asyncio.sleep(0)
    intake.stop()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert bus.num_deliveries == 2
