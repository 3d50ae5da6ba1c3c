"""Replays a workload in a given memory under one policy, and accounts for every slot of it.

A discrete-event simulation that is exact for its model: between two events nothing changes but
that each running request stores one token a step. The model: first come, first served; a prompt is
stored in the step in which its request is admitted, which also gives its first output token; every
running request gets one token a step, however many run. Where a request must grow and no block is
free, the youngest is preempted: it keeps its tokens, goes to the queue's front and is stored anew.

At every moment each slot is exactly one of these (Kwon et al. 2023, PagedAttention, section 3.1 and
figure 2; the names there in brackets):

- *used*: holds the keys and values of a token that no other slot holds ("token states");
- *duplication*: holds a token of a prefix that another running request has stored as well;
- *reserved*: given to a request whose later tokens will fill it ("reservation");
- *internal*: given to a request that will never fill it ("internal fragmentation"): a power of
  two's or a block's unused end counts here;
- *external*: free, while a request waits that is small enough for all free slots together, but that
  the policy cannot place ("external fragmentation and others"): holes, ends too short for the
  smallest region, and the spare block of a paged admission;
- *free*: the other free slots: nobody waits, or the next request is larger than all of them, which
  is the queue's order and no allocator's fault.

*Waste* is the middle four. Shares are means over the steps in which a request waited, that is while
memory was the limit; where none ever did, over the steps in which any ran.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cli.kv_waste.policies import Holding, Policy
from cli.kv_waste.workload import Request, Workload

KINDS = ("used", "duplication", "reserved", "internal", "external", "free")
WASTE = KINDS[1:5]
# Order of what happens in one step.
_END, _GROW = 0, 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """``shares`` of the memory by kind, 1 in sum; ``mean_running`` over the same steps.
    ``is_full``: whether a request ever waited. ``peak_slots``: the most slots allocated."""

    policy: str
    shares: dict[str, float]
    mean_running: float
    peak_running: int
    peak_slots: int
    num_preemptions: int
    is_full: bool
    num_steps: int

    @property
    def waste(self) -> float:
        return sum(self.shares[kind] for kind in WASTE)


@dataclass(slots=True)
class _Waiting:
    request: Request
    num_done: int = 0

    @property
    def num_tokens(self) -> int:
        return self.request.num_prompt + self.num_done


@dataclass(slots=True)
class _Running:
    """In step ``since + n`` it holds ``num_tokens + n`` tokens."""

    holding: Holding
    num_tokens: int
    since: int
    end: int


@dataclass(slots=True)
class _Sums:
    """Slot-steps by kind."""

    num_steps: int = 0
    running: int = 0
    kinds: Counter[str] = field(default_factory=Counter)


class Replay:
    def __init__(self, workload: Workload, policy: Policy) -> None:
        self._workload = workload
        self._policy = policy
        self._arrivals = deque(workload.requests)
        self._queue: deque[_Waiting] = deque()
        self._running: dict[int, _Running] = {}  # by number of admission: the youngest is last
        self._events: list[tuple[int, int, int]] = []  # step, what, number of admission
        self._num_admissions = 0
        self._now = 0
        # What all running requests hold now, in slots (`num_shared` of them not really there).
        self._held = self._room = self._internal = self._repeated = 0
        # The queue's head found no room, and nobody has left since; what it would have to store.
        self._is_blocked = False
        self._num_missing = 0
        self._prefix_refs: Counter[int] = Counter()
        self._full, self._relaxed = _Sums(), _Sums()
        self._peak_running = self._peak_slots = self._num_preemptions = 0

    def run(self, on_end: Callable[[], None] = lambda: None) -> Outcome:
        """``on_end`` is called for each request that ends."""
        while self._arrivals or self._events:
            self._advance(self._next_step())
            while self._events and self._events[0][0] == self._now:
                _, what, number = heapq.heappop(self._events)
                if number not in self._running:
                    continue
                if what == _END:
                    self._leave(number)
                    on_end()
                else:
                    self._grow(number)
            while self._arrivals and self._arrivals[0].arrival <= self._now:
                self._queue.append(_Waiting(self._arrivals.popleft()))
            self._admit()
        assert not self._queue and not self._running and not self._policy.num_allocated
        return self._outcome()

    def _next_step(self) -> int:
        steps = [self._events[0][0]] if self._events else []
        if self._arrivals:
            steps.append(self._arrivals[0].arrival)
        return min(steps)

    def _advance(self, step: int) -> None:
        """Accounts for the steps before ``step``; the request at the queue's head had no room."""
        num_steps, num_running = step - self._now, len(self._running)
        held = self._held * num_steps + num_running * num_steps * (num_steps - 1) // 2
        sums = self._full if self._queue else self._relaxed
        if num_running:
            allocated = self._policy.num_allocated
            num_free = self._policy.num_slots - allocated
            kinds = sums.kinds
            kinds["used"] += held - self._repeated * num_steps
            kinds["duplication"] += (self._repeated - self._policy.num_shared) * num_steps
            kinds["reserved"] += (self._room - self._internal) * num_steps - held
            kinds["internal"] += self._internal * num_steps
            is_lost = self._is_blocked and self._num_missing <= num_free
            kinds["external" if is_lost else "free"] += num_free * num_steps
            sums.num_steps += num_steps
            sums.running += num_running * num_steps
        self._held += num_running * num_steps
        self._now = step

    def _admit(self) -> None:
        while self._queue and not self._is_blocked:
            head = self._queue[0]
            holding = self._policy.admit(head.request, head.num_tokens, not self._running)
            if holding is None:
                self._is_blocked = True
                self._num_missing = self._policy.num_missing(head.request, head.num_tokens)
                break
            self._queue.popleft()
            self._enter(head, holding)
        self._peak_running = max(self._peak_running, len(self._running))
        self._peak_slots = max(self._peak_slots, self._policy.num_allocated)

    def _enter(self, waiting: _Waiting, holding: Holding) -> None:
        number = self._num_admissions
        self._num_admissions += 1
        end = self._now + waiting.request.num_output - waiting.num_done
        self._running[number] = _Running(holding, waiting.num_tokens, self._now, end)
        heapq.heappush(self._events, (end, _END, number))
        self._held += waiting.num_tokens
        self._count_room(holding, 1)
        for key in holding.request.prefix_ids:
            self._repeated += self._workload.segment_tokens * (self._prefix_refs[key] > 0)
            self._prefix_refs[key] += 1
        self._expect_growth(number)

    def _leave(self, number: int) -> _Running:
        """Ended or preempted: it holds ``now - since`` tokens more than at first."""
        running = self._running.pop(number)
        self._is_blocked = False
        self._held -= running.num_tokens + self._now - running.since
        self._count_room(running.holding, -1)
        for key in running.holding.request.prefix_ids:
            self._prefix_refs[key] -= 1
            self._repeated -= self._workload.segment_tokens * (self._prefix_refs[key] > 0)
        self._policy.release(running.holding)
        return running

    def _grow(self, number: int) -> None:
        """Its next token has no slot. The youngest make room, itself perhaps among them."""
        running = self._running[number]
        self._count_room(running.holding, -1)
        while not (has_grown := self._policy.grow(running.holding)):
            youngest = next(reversed(self._running))
            if youngest == number:
                break
            self._preempt(youngest)
        self._count_room(running.holding, 1)
        if has_grown:
            self._expect_growth(number)
        else:
            self._preempt(number)

    def _preempt(self, number: int) -> None:
        running = self._leave(number)
        request = running.holding.request
        num_done = request.num_output - (running.end - self._now)
        self._queue.appendleft(_Waiting(request, num_done))
        self._num_preemptions += 1

    def _expect_growth(self, number: int) -> None:
        running = self._running[number]
        step = running.since + running.holding.room - running.num_tokens + 1
        if step < running.end:
            heapq.heappush(self._events, (step, _GROW, number))

    def _count_room(self, holding: Holding, sign: int) -> None:
        self._room += sign * holding.room
        self._internal += sign * max(0, holding.room - holding.request.num_stored)

    def _outcome(self) -> Outcome:
        is_full = self._full.num_steps > 0
        sums = self._full if is_full else self._relaxed
        whole = self._policy.num_slots * sums.num_steps
        return Outcome(
            policy=self._policy.name,
            shares={kind: sums.kinds[kind] / whole for kind in KINDS},
            mean_running=sums.running / sums.num_steps,
            peak_running=self._peak_running,
            peak_slots=self._peak_slots,
            num_preemptions=self._num_preemptions,
            is_full=is_full,
            num_steps=self._now,
        )
