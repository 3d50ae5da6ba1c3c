"""The bounds of what waits at this gateway, and the one place where a client is refused.

Everything that has no worker yet waits here, not in NATS and not in a worker:

1. `enter` counts a new request, or refuses it: too many requests or prompt tokens wait, of its
   tenant or of all; or its time would be over before its turn. Nothing was spent on it by then.
2. In its `turn` a request asks a decode worker for room: at most one request a decode worker at a
   time, so the order of the gate (gateway/fair_gate.py) is the order of service.
3. `leave` when a worker has it, or when it ends. What comes back later, because its worker was
   lost, is not refused any more.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from common.errors import DeadlineExceeded, Overloaded
from gateway.fair_gate import FairGate
from gateway.run import Run

# A request is refused for its deadline only when that is so many times too short: rates vary.
_DEADLINE_MARGIN = 2.0
_RETRY_S = (0.1, 30.0)
_RETRY_UNMEASURED_S = 1.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of requests and their prompt tokens that wait for a worker, in all and of one tenant."""

    requests: int
    tokens: int
    tenant_requests: int
    tenant_tokens: int


@dataclass(slots=True)
class _Waiting:
    """What waits of one tenant, or in all."""

    num_requests: int = 0
    num_tokens: int = 0

    def add(self, num_requests: int, num_tokens: int) -> None:
        self.num_requests += num_requests
        self.num_tokens += num_tokens

    def exceeded(self, num_tokens: int, max_requests: int, max_tokens: int) -> str:
        """What is full, for a request of so many tokens; empty where there is room. A single
        request of any length may wait."""
        if self.num_requests >= max_requests:
            return f"{max_requests} requests are waiting"
        if self.num_requests and self.num_tokens + num_tokens > max_tokens:
            return f"{max_tokens} prompt tokens are waiting"
        return ""


@dataclass(slots=True)
class Admission:
    """``width``: how many may ask for room at a time. ``tokens_per_s``: measured speed of all
    workers that compute prompts, 0 while nothing was measured."""

    bounds: Bounds
    width: Callable[[], int]
    tokens_per_s: Callable[[], float]
    # Prompt tokens that may wait of a tenant whose API key says so, instead of the bounds'.
    tokens_of_tenant: dict[str, int] = field(default_factory=dict)
    gate: FairGate = field(init=False)
    # By reason: tenant_full, full, deadline.
    refusals: Counter[str] = field(default_factory=Counter)
    _total: _Waiting = field(default_factory=_Waiting)
    _tenants: dict[str, _Waiting] = field(default_factory=dict)
    _runs: dict[str, Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate = FairGate(self.width)

    @property
    def num_refused(self) -> int:
        return self.refusals.total()

    @property
    def num_waiting(self) -> int:
        return self._total.num_requests

    @property
    def num_tokens(self) -> int:
        return self._total.num_tokens

    def enter(self, run: Run) -> None:
        """Raises Overloaded, with when to come back, or DeadlineExceeded."""
        tenant, num_tokens = run.request.tenant, len(run.request.prompt_ids)
        waiting = self._tenants.get(tenant, _Waiting())
        bounds = self.bounds
        tenant_tokens = self.tokens_of_tenant.get(tenant, bounds.tenant_tokens)
        full = waiting.exceeded(num_tokens, bounds.tenant_requests, tenant_tokens)
        if full:
            self._refuse("tenant_full", f"{full} for this tenant", waiting.num_tokens)
        if full := self._total.exceeded(num_tokens, bounds.requests, bounds.tokens):
            self._refuse("full", full, self._total.num_tokens)
        self._check_deadline(run)
        self._tenants[tenant] = waiting
        self._runs[run.request_id] = run
        for counted in (waiting, self._total):
            counted.add(1, num_tokens)

    def leave(self, run: Run) -> None:
        """Idempotent."""
        if self._runs.pop(run.request_id, None) is None:
            return
        tenant = run.request.tenant
        for counted in (self._tenants[tenant], self._total):
            counted.add(-1, -len(run.request.prompt_ids))
        if not self._tenants[tenant].num_requests:
            del self._tenants[tenant]

    @asynccontextmanager
    async def turn(self, run: Run, look: Callable[[], None] | None) -> AsyncIterator[None]:
        """Waits for the run's turn to ask for room; the next one comes when the block ends.
        ``look``, if any, is called now and then, and ends the wait by what it raises."""
        await self.gate.acquire(run, look)
        try:
            yield
        finally:
            self.gate.release()

    def _refuse(self, reason: str, full: str, num_tokens: int) -> None:
        self.refusals[reason] += 1
        rate = self.tokens_per_s()
        after_s = num_tokens / rate if rate else _RETRY_UNMEASURED_S
        least_s, most_s = _RETRY_S
        raise Overloaded(f"{full}; try again later", min(max(after_s, least_s), most_s))

    def _check_deadline(self, run: Run) -> None:
        """Counts only what is sure to go first: the tenant's own of no lower a priority."""
        rate = self.tokens_per_s()
        if not rate:
            return
        request = run.request
        num_tokens = len(request.prompt_ids) + sum(
            len(other.request.prompt_ids)
            for other in self._runs.values()
            if other.request.tenant == request.tenant and other.request.priority <= request.priority
        )
        if num_tokens / rate > request.timeout_s * _DEADLINE_MARGIN:
            self.refusals["deadline"] += 1
            raise DeadlineExceeded(
                f"{num_tokens} prompt tokens come first; that is more than {request.timeout_s:g} s"
            )
