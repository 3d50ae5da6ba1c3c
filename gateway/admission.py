"""The gateway's own queue: bounded, ordered, and the one place where a client is refused.

Everything that has no room yet waits here, not in NATS and not in a worker. At most one request a
decode worker is asking for room at any time, so the order of this queue is the order of service:
requests that have already given tokens first, then by priority (lower first), then by age.
"""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from common.errors import Overloaded
from gateway.run import Run

_Key = tuple[bool, int, int]


@dataclass(slots=True)
class Admission:
    """``width`` says how many may ask for room at the same time."""

    max_requests: int
    max_tokens: int
    width: Callable[[], int]
    num_tokens: int = 0
    num_refused: int = 0
    _waiting: list[tuple[_Key, asyncio.Future[None]]] = field(default_factory=list)
    _num_asking: int = 0
    _counter: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._num_asking

    def check(self, num_prompt_tokens: int) -> None:
        """Raises Overloaded when the queue is full, before anything was spent on the request."""
        if self.num_waiting >= self.max_requests:
            self.num_refused += 1
            raise Overloaded(f"{self.max_requests} requests are waiting; try again later")
        if self.num_waiting and self.num_tokens + num_prompt_tokens > self.max_tokens:
            self.num_refused += 1
            raise Overloaded(f"{self.max_tokens} prompt tokens are waiting; try again later")

    @asynccontextmanager
    async def turn(self, run: Run) -> AsyncIterator[None]:
        """Waits for the run's turn to ask for room; the next one comes when the block ends."""
        num_tokens = run.num_tokens
        self.num_tokens += num_tokens
        try:
            await self._acquire(run)
            try:
                yield
            finally:
                self._num_asking -= 1
                self.wake()
        finally:
            self.num_tokens -= num_tokens

    async def _acquire(self, run: Run) -> None:
        if not self._waiting and self._num_asking < max(1, self.width()):
            self._num_asking += 1
            return
        key = (not run.resumed, run.request.priority, next(self._counter))
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        item = (key, waiter)
        heapq.heappush(self._waiting, item)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._num_asking -= 1
            elif item in self._waiting:  # else `wake` came in between, and took it out
                self._waiting.remove(item)
                heapq.heapify(self._waiting)
            self.wake()
            raise

    def wake(self) -> None:
        """Lets the next ones ask; also called when a decode worker came."""
        while self._waiting and self._num_asking < max(1, self.width()):
            _, waiter = heapq.heappop(self._waiting)
            if not waiter.done():
                self._num_asking += 1
                waiter.set_result(None)
