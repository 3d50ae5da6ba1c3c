"""Promises on the event loop: asks, answers and deadlines around the sans-IO `Reservations`."""

import asyncio
from collections.abc import Callable, Sequence

from common.wire import worker as wire
from decode_worker.reservations import (
    Answer,
    Occupancy,
    RefusalReason,
    Reservations,
    ReservationStatistics,
    StreamId,
)

Send = Callable[[StreamId, wire.StreamResponse], None]


class Promises:
    """``send`` answers on a stream; ``occupancy`` is what the pool holds as far as is known."""

    def __init__(
        self, reservations: Reservations, send: Send, occupancy: Callable[[], Occupancy]
    ) -> None:
        self._reservations = reservations
        self._send = send
        self._occupancy = occupancy
        self._deadline_changed = asyncio.Event()

    @property
    def num_blocks(self) -> int:
        return self._reservations.promised_blocks

    @property
    def is_empty(self) -> bool:
        return self._reservations.num_promises == 0

    def statistics(self) -> ReservationStatistics:
        return self._reservations.statistics()

    def reserve(self, stream: StreamId, request: wire.Reserve) -> None:
        answer = self._reservations.reserve(
            stream,
            request.request_id,
            request.attempt,
            request.num_blocks,
            asyncio.get_running_loop().time() + request.remaining_ms / 1000,
        )
        if answer is not None:
            self._answer([answer])
        self._deadline_changed.set()
        self.grant()

    def refuse(self, stream: StreamId, request: wire.Reserve) -> None:
        """Its `reserve` met a bug, before or after it came to the ledger."""
        request_id, attempt = request.request_id, request.attempt
        self._answer([Answer(stream, request_id, attempt, RefusalReason.INTERNAL)])
        self.unreserve(stream, request_id, attempt)

    def unreserve(self, stream: StreamId, request_id: str, attempt: int) -> None:
        self._reservations.unreserve(stream, request_id, attempt)
        self.grant()

    def start(self, stream: StreamId, request_id: str, attempt: int) -> bool:
        """The promise becomes a sequence; its blocks stay counted until `landed`."""
        return self._reservations.start(stream, request_id, attempt)

    def landed(self, stream: StreamId, request_id: str, attempt: int) -> None:
        self._reservations.landed(stream, request_id, attempt)

    def drop_stream(self, stream: StreamId) -> None:
        self._reservations.drop_stream(stream)
        self.grant()

    def drain(self) -> None:
        self._answer(self._reservations.drain())

    def grant(self) -> None:
        """To be called whenever room may have come."""
        self._answer(self._reservations.grant(self._occupancy()))

    async def run(self) -> None:
        """Takes back what runs out, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            try:
                async with asyncio.timeout_at(self._reservations.next_deadline_s()):
                    await self._deadline_changed.wait()
            except TimeoutError:
                self._answer(self._reservations.expire(clock()))
                self.grant()
            self._deadline_changed.clear()

    def _answer(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._send(answer.stream, _message(answer))


def _message(answer: Answer) -> wire.StreamResponse:
    request_id, attempt = answer.request_id, answer.attempt
    if answer.refusal is None:
        return wire.StreamResponse(granted=wire.Granted(request_id=request_id, attempt=attempt))
    refused = wire.Refused(request_id=request_id, attempt=attempt, reason=answer.refusal.value)
    return wire.StreamResponse(refused=refused)
