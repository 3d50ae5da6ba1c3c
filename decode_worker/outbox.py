"""What waits to be written to one gateway. Putting never waits, whatever the gateway does."""

import asyncio
from collections import deque
from dataclasses import dataclass

from common.wire import worker as wire


@dataclass(frozen=True, slots=True)
class _Entry:
    message: wire.StreamResponse
    num_bytes: int
    put_s: float
    step_end_s: float | None


class Outbox:
    """In order; one reader. Times are of the running loop's clock."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        self._num_bytes = 0
        self._changed = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._closed = False
        self._clock = asyncio.get_running_loop().time

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def age_s(self) -> float:
        """How long the oldest message has been waiting."""
        return self._clock() - self._entries[0].put_s if self._entries else 0.0

    def put(self, message: wire.StreamResponse, step_end_s: float | None = None) -> None:
        """``step_end_s``: for tokens, when their step ended."""
        if self._closed:
            return
        entry = _Entry(message, message.ByteSize(), self._clock(), step_end_s)
        self._entries.append(entry)
        self._num_bytes += entry.num_bytes
        self._changed.set()
        self._empty.clear()

    def close(self) -> None:
        """What still waits is dropped."""
        self._closed = True
        self._entries.clear()
        self._num_bytes = 0
        self._changed.set()
        self._empty.set()

    async def wait_empty(self) -> None:
        """Until the last message was taken."""
        await self._empty.wait()

    async def get(self) -> wire.StreamResponse | None:
        """The next message, tokens stamped with their age; None once closed."""
        while not self._entries:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        entry = self._entries.popleft()
        self._num_bytes -= entry.num_bytes
        if not self._entries:
            self._empty.set()
        if entry.step_end_s is not None:
            age_s = max(0.0, self._clock() - entry.step_end_s)
            entry.message.step_tokens.age_ms = age_s * 1000
        return entry.message
