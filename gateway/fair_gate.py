"""A gate that lets so many through at a time, and the order in which the others wait before it.

1. Requests that have lost a worker, of whatever tenant, by priority and then by age.
2. Then tenants in turn, by the tokens that each was let through with: start-time fair queueing
   (Goyal, Vin, Cheng 1996, section 3). A tenant's flood waits behind itself: another tenant's next
   request waits for at most one of the flood's for each of its own.
3. Within a tenant by priority, lower first, as in vLLM, and then by age.

Virtual time is the start tag of the request let through last. A tenant's next request starts at
virtual time or at the end of the tenant's last one, whichever is later; the lowest start goes next.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.run import Run

# How often a waiting request looks whether it should still wait.
_LOOK_S = 0.25

_Key = tuple[int, int]
_Item = tuple[_Key, Run, asyncio.Future[None]]


@dataclass(slots=True)
class FairGate:
    """``width`` says how many may be inside; whoever `acquire` let in calls `release` once."""

    width: Callable[[], int]
    num_inside: int = 0
    _resumed: list[_Item] = field(default_factory=list)
    _tenants: dict[str, list[_Item]] = field(default_factory=dict)
    # Ends of the tenants' last requests in virtual time; none where it is over.
    _ends: dict[str, float] = field(default_factory=dict)
    _virtual: float = 0.0
    _counter: "itertools.count[int]" = field(default_factory=itertools.count)

    @property
    def num_waiting(self) -> int:
        return len(self._resumed) + sum(map(len, self._tenants.values()))

    async def acquire(self, run: Run, look: Callable[[], None] | None = None) -> None:
        """Returns when it is the run's turn. ``look``, if any, is called now and then, and ends
        the wait by what it raises."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        item = ((run.request.priority, next(self._counter)), run, waiter)
        queue = self._queue_of(run)
        heapq.heappush(queue, item)
        self.wake()
        try:
            while not waiter.done():
                await asyncio.wait((waiter,), timeout=_LOOK_S if look else None)
                if look:
                    look()
        except BaseException:
            if waiter.done():
                self.release()
            else:
                self._withdraw(queue, item)
            raise

    def release(self) -> None:
        self.num_inside -= 1
        self.wake()

    def wake(self) -> None:
        """Lets the next ones in; to be called when ``width`` may have grown."""
        while self.num_inside < max(1, self.width()) and (item := self._pop()) is not None:
            self.num_inside += 1
            item[2].set_result(None)

    def _queue_of(self, run: Run) -> list[_Item]:
        return self._resumed if run.resumed else self._tenants.setdefault(run.request.tenant, [])

    def _withdraw(self, queue: list[_Item], item: _Item) -> None:
        queue.remove(item)
        heapq.heapify(queue)
        self._forget_idle(item[1].request.tenant)

    def _pop(self) -> _Item | None:
        if self._resumed:
            return heapq.heappop(self._resumed)
        if not self._tenants:
            return None
        tenant = min(self._tenants, key=lambda name: (self._start(name), self._tenants[name][0]))
        item = heapq.heappop(self._tenants[tenant])
        self._virtual = self._start(tenant)
        self._ends[tenant] = self._virtual + item[1].num_tokens
        self._forget_idle(tenant)
        return item

    def _start(self, tenant: str) -> float:
        return max(self._virtual, self._ends.get(tenant, 0.0))

    def _forget_idle(self, tenant: str) -> None:
        """What a tenant was let through with counts against it until virtual time has passed it."""
        if not self._tenants.get(tenant, ()):
            self._tenants.pop(tenant, None)
        if not self._tenants:
            self._ends.clear()
        elif len(self._ends) > 2 * len(self._tenants) + 64:
            self._ends = {name: end for name, end in self._ends.items() if end > self._virtual}
