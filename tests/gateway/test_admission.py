"""The gateway's queue: bounded in all and by tenant, and served in order."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import DeadlineExceeded, Overloaded
from common.types import SamplingParams
from gateway.admission import Admission, Bounds
from gateway.fair_gate import FairGate
from gateway.request import Request
from gateway.run import Counters, Run

ROOMY = Bounds(requests=100, tokens=1000, tenant_requests=100, tenant_tokens=1000)


def make_run(
    name: str,
    priority: int = 0,
    resumed: bool = False,
    tenant: str = "",
    num_tokens: int = 1,
    timeout_s: float = 10.0,
) -> Run:
    params = SamplingParams(max_tokens=1, seed=0)
    prompt = (1,) * num_tokens
    request = Request(name, "", prompt, params, timeout_s, priority=priority, tenant=tenant)
    run = Run(request, 0.0, Counters())
    run.new_attempt()
    if resumed:
        run.new_attempt()
    return run


def make_admission(bounds: Bounds = ROOMY, tokens_per_s: float = 0.0) -> Admission:
    return Admission(bounds, width=lambda: 1, tokens_per_s=lambda: tokens_per_s)


class Line:
    """Runs before a gate of width 1, and the order in which they are let through."""

    def __init__(self) -> None:
        self.gate = FairGate(width=lambda: 1)
        self.order: list[str] = []
        self.may_leave = asyncio.Event()

    async def go_through(self, run: Run) -> None:
        await self.gate.acquire(run)
        try:
            self.order.append(run.request_id)
            await self.may_leave.wait()
        finally:
            self.gate.release()

    @asynccontextmanager
    async def queued(self, *runs: Run):
        """All of them wait, in the order given; then they go through. Yields their tasks."""
        tasks = [asyncio.ensure_future(self.go_through(run)) for run in runs]
        await asyncio.sleep(0)
        yield tasks
        self.may_leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (self.gate.num_inside, self.gate.num_waiting) == (0, 0)


async def test_resumed_first_then_by_priority_then_by_age() -> None:
    line = Line()
    runs = (
        make_run("first"),
        make_run("late", priority=1),
        make_run("a"),
        make_run("b"),
        make_run("urgent", priority=-1),
        make_run("resumed", priority=5, resumed=True),
    )
    async with line.queued(*runs):
        assert line.order == ["first"]
        assert line.gate.num_waiting == 5
    assert line.order == ["first", "resumed", "urgent", "a", "b", "late"]


async def test_a_flood_waits_behind_itself() -> None:
    """However urgent it says it is, and however early it came."""
    line = Line()
    flood = [make_run(f"flood {i}", tenant="f", priority=-9) for i in range(50)]
    others = [make_run(f"{tenant}{i}", tenant=tenant) for i in range(3) for tenant in "ab"]
    async with line.queued(*flood, *others):
        pass
    assert {"a0", "b0", "a1", "b1", "a2", "b2"} <= set(line.order[:10])


@settings(max_examples=20, deadline=None)
@given(sizes=st.dictionaries(st.sampled_from("abcde"), st.integers(1, 50), min_size=2, max_size=5))
def test_tenants_that_always_wait_get_equal_tokens(sizes: dict[str, int]) -> None:
    """Whatever the lengths of their prompts: SFQ, theorem 1."""

    async def served() -> Counter[str]:
        line = Line()
        tokens: Counter[str] = Counter()
        runs = [
            make_run(f"{tenant}{i}", tenant=tenant, num_tokens=size)
            for tenant, size in sizes.items()
            for i in range(60)
        ]
        async with line.queued(*runs):
            pass
        left = dict.fromkeys(sizes, 60)
        for request_id in line.order:
            tenant = request_id[0]
            tokens[tenant] += sizes[tenant]
            left[tenant] -= 1
            if not all(left.values()):
                return tokens
        return tokens

    tokens = asyncio.run(served())
    for one, size in sizes.items():
        for other, other_size in sizes.items():
            assert abs(tokens[one] - tokens[other]) <= 2 * (size + other_size)


async def test_a_tenant_that_asks_one_by_one_starves_nobody() -> None:
    gate = FairGate(width=lambda: 1)
    order: list[str] = []

    async def client(tenant: str) -> None:
        for i in range(20):
            await gate.acquire(make_run(f"{tenant}{i}", tenant=tenant))
            order.append(tenant)
            await asyncio.sleep(0)
            gate.release()

    await asyncio.gather(client("a"), client("b"), client("c"))
    for turns in range(3, 58, 3):
        assert max(Counter(order[:turns]).values()) <= turns // 3 + 1


async def test_one_that_leaves_the_queue_takes_no_turn() -> None:
    line = Line()
    async with line.queued(*(make_run(name) for name in "abc")) as tasks:
        tasks[1].cancel()
        await asyncio.sleep(0)
    assert line.order == ["a", "c"]


async def test_one_that_leaves_in_the_moment_of_its_turn() -> None:
    line = Line()
    async with line.queued(make_run("first"), make_run("second")) as tasks:
        line.may_leave.set()
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
    assert line.gate.num_inside == 0


@pytest.mark.parametrize(
    ("bounds", "what"),
    [
        (Bounds(2, 1000, 100, 1000), "2 requests are waiting; try"),
        (Bounds(100, 9, 100, 1000), "9 prompt tokens are waiting; try"),
        (Bounds(100, 1000, 2, 1000), "2 requests are waiting for this tenant"),
        (Bounds(100, 1000, 100, 9), "9 prompt tokens are waiting for this tenant"),
    ],
)
def test_a_full_queue_refuses_with_a_time_to_come_back(bounds: Bounds, what: str) -> None:
    admission = make_admission(bounds, tokens_per_s=5.0)
    runs = [make_run(name, num_tokens=4, tenant="t") for name in "ab"]
    for run in runs:
        admission.enter(run)
    with pytest.raises(Overloaded, match=what) as refused:
        admission.enter(make_run("c", num_tokens=4, tenant="t"))
    assert refused.value.retry_after_s == pytest.approx(8 / 5)
    if "tenant" in what:
        admission.enter(other := make_run("d", num_tokens=4, tenant="other"))
        admission.leave(other)
    admission.leave(runs[0])
    admission.leave(runs[0])
    admission.enter(last := make_run("e", num_tokens=4, tenant="t"))
    for run in (runs[1], last):
        admission.leave(run)
    assert (admission.num_waiting, admission.num_tokens, admission.num_refused) == (0, 0, 1)


def test_a_single_request_of_any_length_may_wait() -> None:
    admission = make_admission(Bounds(10, 5, 10, 5))
    admission.enter(make_run("long", num_tokens=500))
    with pytest.raises(Overloaded):
        admission.enter(make_run("short"))


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    admission = make_admission(tokens_per_s=10.0)
    admission.enter(make_run("long", num_tokens=300, timeout_s=100.0))
    with pytest.raises(DeadlineExceeded, match="301 prompt tokens come first"):
        admission.enter(make_run("hurried", timeout_s=10.0))
    # Those of another tenant, or of a lower priority, may come later; and rates vary.
    admission.enter(make_run("other tenant", timeout_s=10.0, tenant="t"))
    admission.enter(make_run("urgent", timeout_s=10.0, priority=-1))
    admission.enter(make_run("in time", timeout_s=16.0))
    assert admission.num_refused == 1


def test_nothing_is_refused_for_its_deadline_while_nothing_was_measured() -> None:
    admission = make_admission()
    admission.enter(make_run("long", num_tokens=900))
    admission.enter(make_run("hurried", timeout_s=0.001))
