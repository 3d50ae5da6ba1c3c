"""Where jobs come in: from the shared queue, or sent to this worker by name.

The queue is asked only while there is a free slot, with short fetches that are never cancelled (a
cancelled fetch leaves its request at the server, which then hands a job to nobody). A job fetched
after the slot went to a chosen one goes back to the queue at once. Every delivery is acked as soon
as it is understood who works on it: the gateway alone has work done again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from google.protobuf.message import DecodeError

from common import failpoints
from common.bus import Bus, BusError, Message, worker_cancel_subject, worker_job_subject
from common.bus import Job as Delivery
from common.types import RequestId, WorkerId
from common.wire import worker as wire
from prefill_worker.job import Job, parse_job
from worker.sequences import SequenceIds

log = logging.getLogger(__name__)

FETCH_S = 1.0

Ack = Callable[[], Awaitable[None]]


class JobTaker(Protocol):
    """Implemented by `Jobs`."""

    @property
    def has_free_slot(self) -> bool: ...

    def knows(self, key: tuple[RequestId, int]) -> bool: ...

    def take(self, job: Job, ack: Ack) -> None:
        """Starts to ask for the job; ``ack`` is awaited when the gateway has answered."""
        ...

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        """Ends this attempt of the request and every earlier one."""
        ...


class Intake:
    def __init__(self, bus: Bus, worker_id: WorkerId, taker: JobTaker) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._taker = taker
        self._ids = SequenceIds()
        self._open = asyncio.Event()
        self._stopped = False
        self.num_malformed = 0
        self.num_returned = 0
        self.num_busy = 0

    def slot_changed(self) -> None:
        if self._stopped or self._taker.has_free_slot:
            self._open.set()
        else:
            self._open.clear()

    def stop(self) -> None:
        """`run` returns when its fetch has; chosen jobs are answered busy from now on."""
        self._stopped = True
        self._open.set()

    async def run(self) -> None:
        await self._bus.subscribe(worker_job_subject(self._worker_id), self._chosen)
        await self._bus.subscribe(worker_cancel_subject(self._worker_id), self._cancelled)
        self.slot_changed()
        while not self._stopped:
            await self._open.wait()
            if not self._stopped and (delivery := await self._bus.fetch_job(FETCH_S)) is not None:
                await self._pulled(delivery)

    async def _pulled(self, delivery: Delivery) -> None:
        try:
            await self._judge(delivery)
        except Exception:
            log.exception("a bug in what is done with a job")
            # It would do the same to the next worker: its gateway publishes it again, and counts.
            with suppress(BusError):
                await delivery.ack()

    async def _judge(self, delivery: Delivery) -> None:
        if await failpoints.hit_async("prefill.after_pull") == failpoints.DROP:
            return
        job = parse_job(delivery.data, delivery.headers, self._ids.new())
        with suppress(BusError):
            if job is None:
                self.num_malformed += 1
                await delivery.ack()
            elif self._taker.knows(job.key):
                await delivery.ack()
            elif self._stopped or not self._taker.has_free_slot:
                self.num_returned += 1
                # Blocks may have gone without a word: do not pull it again at once.
                self.slot_changed()
                await delivery.nak()
            else:
                self._taker.take(job, delivery.ack)

    async def _chosen(self, message: Message) -> None:
        job = parse_job(message.data, message.headers, self._ids.new())
        accepted = False
        if job is None:
            self.num_malformed += 1
        elif self._taker.knows(job.key):
            accepted = True
        elif self._stopped or not self._taker.has_free_slot:
            self.num_busy += 1
        else:
            accepted = True
            self._taker.take(job, _nothing_to_ack)
        if await failpoints.hit_async("prefill.before_chosen_reply") == failpoints.DROP:
            return
        with suppress(BusError):
            await message.reply(wire.TargetedJobReply(accepted=accepted).SerializeToString())

    async def _cancelled(self, message: Message) -> None:
        try:
            cancel = wire.PrefillCancel.FromString(message.data)
        except DecodeError:
            self.num_malformed += 1
            return
        self._taker.cancel(cancel.request_id, cancel.attempt)


async def _nothing_to_ack() -> None:
    """A job sent by name was answered already."""
