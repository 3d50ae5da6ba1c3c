"""The ledger of promises: how many blocks this worker has said yes to, and to whom.

The life of a promise:

1. *asked*: a gateway's Reserve waits in one queue, first come first served over all gateways.
2. *granted*: the head of the queue, while promised + importing + in use + watermark stays within
   ``lookahead`` x total. A promise is a count, never a block.
3. *started*: its Start came. The count stays until the engine has blocks for the sequence, so that
   the same room is not promised twice in between.
4. gone: it has *landed* (the pool's own counts hold it from now on), or was given back, or its
   deadline passed, or its stream ended.

A promise belongs to a request on its stream. A higher attempt takes it over; a lower one is stale:
refused and counted. Sans IO: time comes in as an argument, answers go out as values.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from common.types import BlockCounts, RequestId

# One bidirectional stream of one gateway; a new one after each reconnect.
StreamId = NewType("StreamId", int)


class RefusalReason(StrEnum):
    TOO_LARGE = "too_large"
    DRAINING = "draining"
    STALE_ATTEMPT = "stale_attempt"
    DEADLINE = "deadline"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a Reserve is told; ``refusal`` None means granted."""

    stream: StreamId
    request_id: RequestId
    attempt: int
    refusal: RefusalReason | None = None


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What the pool itself holds, and how many sequences may need a block in the next step."""

    total: int
    in_use: int
    importing: int
    running: int

    @classmethod
    def of(cls, blocks: BlockCounts, running: int) -> "Occupancy":
        return cls(blocks.total, blocks.in_use, blocks.importing, running)

    @property
    def watermark(self) -> int:
        return max(1, self.running)


@dataclass(frozen=True, slots=True)
class ReservationStatistics:
    promised_blocks: int
    limit_blocks: int
    promises: int
    waiting: int
    granted: int
    refused: int
    stale: int
    expired: int


@dataclass(frozen=True, slots=True)
class _Entry:
    stream: StreamId
    request_id: RequestId
    attempt: int
    num_blocks: int
    deadline_s: float

    @property
    def key(self) -> tuple[StreamId, RequestId]:
        return (self.stream, self.request_id)

    def answer(self, refusal: RefusalReason | None = None) -> Answer:
        return Answer(self.stream, self.request_id, self.attempt, refusal)


class Reservations:
    """One per decode worker. All methods are synchronous and run on the event loop."""

    def __init__(self, total_blocks: int, lookahead: float) -> None:
        self._limit = int(lookahead * total_blocks)
        # An idle pool keeps a watermark of one block: what does not fit beside it never fits.
        self._largest = min(total_blocks, self._limit - 1)
        self._promises: dict[tuple[StreamId, RequestId], _Entry] = {}
        self._waiting: dict[tuple[StreamId, RequestId], _Entry] = {}
        # Blocks of started sequences that the engine has no blocks for yet.
        self._started: dict[tuple[StreamId, RequestId, int], int] = {}
        self._draining = False
        self._granted = self._refused = self._stale = self._expired = 0

    @property
    def promised_blocks(self) -> int:
        promised = sum(entry.num_blocks for entry in self._promises.values())
        return promised + sum(self._started.values())

    @property
    def num_promises(self) -> int:
        return len(self._promises) + len(self._started)

    def reserve(
        self,
        stream: StreamId,
        request_id: RequestId,
        attempt: int,
        num_blocks: int,
        deadline_s: float,
    ) -> Answer | None:
        """Answers at once when refused or taken over; None means queued, see `grant`."""
        entry = _Entry(stream, request_id, attempt, num_blocks, deadline_s)
        known = self._promises.get(entry.key) or self._waiting.get(entry.key)
        if known and attempt < known.attempt:
            self._stale += 1
            return entry.answer(RefusalReason.STALE_ATTEMPT)
        if self._draining:
            return self._refuse(entry, RefusalReason.DRAINING)
        if num_blocks > self._largest:
            self._forget(entry.key)
            return self._refuse(entry, RefusalReason.TOO_LARGE)
        held = self._promises.get(entry.key)
        if held and num_blocks <= held.num_blocks:
            self._promises[entry.key] = entry
            return entry.answer()
        if held:
            # It grew: it gives its room back and asks again, before all others.
            del self._promises[entry.key]
            self._waiting = {entry.key: entry, **self._waiting}
        else:
            self._waiting[entry.key] = entry
        return None

    def grant(self, pool: Occupancy) -> list[Answer]:
        """Grants from the head of the queue while there is room."""
        answers: list[Answer] = []
        room = self._limit - pool.in_use - pool.importing - pool.watermark - self.promised_blocks
        for key, entry in list(self._waiting.items()):
            if entry.num_blocks > room:
                break
            room -= entry.num_blocks
            self._promises[key] = self._waiting.pop(key)
            self._granted += 1
            answers.append(entry.answer())
        return answers

    def start(self, stream: StreamId, request_id: RequestId, attempt: int) -> bool:
        """Turns a promise into a started one. False: there is none, or the attempt is stale."""
        held = self._promises.get((stream, request_id))
        if held is None or attempt < held.attempt:
            self._stale += 1
            return False
        del self._promises[held.key]
        self._started[stream, request_id, attempt] = held.num_blocks
        return True

    def landed(self, stream: StreamId, request_id: RequestId, attempt: int) -> None:
        """The pool's counts hold the sequence now, or it is gone."""
        self._started.pop((stream, request_id, attempt), None)

    def unreserve(self, stream: StreamId, request_id: RequestId, attempt: int) -> None:
        key = (stream, request_id)
        known = self._promises.get(key) or self._waiting.get(key)
        if known is None:
            return
        if attempt < known.attempt:
            self._stale += 1
            return
        self._forget(key)

    def drop_stream(self, stream: StreamId) -> None:
        """The stream has ended, and with it every promise on it. What has started lands later."""
        for entry in [entry for entry in self._all() if entry.stream == stream]:
            self._forget(entry.key)

    def drain(self) -> list[Answer]:
        """No new promises from now on. Those given stay good."""
        self._draining = True
        answers = [self._refuse(e, RefusalReason.DRAINING) for e in self._waiting.values()]
        self._waiting.clear()
        return answers

    def expire(self, now_s: float) -> list[Answer]:
        """Takes back what passed its deadline; a sequence has a deadline of its own."""
        late = [entry for entry in self._all() if entry.deadline_s <= now_s]
        for entry in late:
            self._forget(entry.key)
            self._expired += 1
        return [self._refuse(entry, RefusalReason.DEADLINE) for entry in late]

    def next_deadline_s(self) -> float | None:
        return min((entry.deadline_s for entry in self._all()), default=None)

    def statistics(self) -> ReservationStatistics:
        return ReservationStatistics(
            promised_blocks=self.promised_blocks,
            limit_blocks=self._limit,
            promises=self.num_promises,
            waiting=len(self._waiting),
            granted=self._granted,
            refused=self._refused,
            stale=self._stale,
            expired=self._expired,
        )

    def _all(self) -> Iterator[_Entry]:
        yield from self._promises.values()
        yield from self._waiting.values()

    def _forget(self, key: tuple[StreamId, RequestId]) -> None:
        self._promises.pop(key, None)
        self._waiting.pop(key, None)

    def _refuse(self, entry: _Entry, reason: RefusalReason) -> Answer:
        self._refused += 1
        return entry.answer(reason)
