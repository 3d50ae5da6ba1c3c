"""The gateway's queue: bounded, and served in order."""

import asyncio

import pytest

from common.errors import Overloaded
from common.types import SamplingParams
from gateway.admission import Admission
from gateway.request import Request
from gateway.run import Counters, Run


def make_run(name: str, priority: int = 0, resumed: bool = False) -> Run:
    params = SamplingParams(max_tokens=1, seed=0)
    run = Run(Request(name, "", (1,), params, 10.0, priority=priority), 0.0, Counters())
    run.new_attempt()
    if resumed:
        run.new_attempt()
    return run


async def test_resumed_first_then_by_priority_then_by_age() -> None:
    admission = Admission(100, 1000, width=lambda: 1)
    order: list[str] = []
    release = asyncio.Event()

    async def ask(run: Run) -> None:
        async with admission.turn(run):
            order.append(run.request_id)
            await release.wait()

    async with asyncio.TaskGroup() as group:
        for run in (
            make_run("first"),
            make_run("late", priority=1),
            make_run("a"),
            make_run("b"),
            make_run("urgent", priority=-1),
            make_run("resumed", priority=5, resumed=True),
        ):
            group.create_task(ask(run))
        await asyncio.sleep(0)
        assert order == ["first"]
        assert admission.num_waiting == 6
        release.set()
    assert order == ["first", "resumed", "urgent", "a", "b", "late"]
    assert (admission.num_waiting, admission.num_tokens) == (0, 0)


async def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    admission = Admission(2, 1000, width=lambda: 1)
    release = asyncio.Event()

    async def ask(run: Run) -> None:
        async with admission.turn(run):
            await release.wait()

    tasks = [asyncio.ensure_future(ask(make_run(str(i)))) for i in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refused:
        admission.check(1)
    assert refused.value.retry_after_s > 0
    release.set()
    await asyncio.gather(*tasks)
    admission.check(1)


async def test_one_that_leaves_the_queue_takes_no_turn() -> None:
    admission = Admission(100, 1000, width=lambda: 1)
    release = asyncio.Event()
    done: list[str] = []

    async def ask(run: Run) -> None:
        async with admission.turn(run):
            await release.wait()
            done.append(run.request_id)

    tasks = {name: asyncio.ensure_future(ask(make_run(name))) for name in "abc"}
    await asyncio.sleep(0)
    tasks["b"].cancel()
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(tasks["a"], tasks["c"])
    assert done == ["a", "c"]
    assert (admission.num_waiting, admission.num_tokens) == (0, 0)


async def test_one_that_leaves_in_the_moment_of_its_turn() -> None:
    admission = Admission(2, 1000, width=lambda: 1)
    release = asyncio.Event()

    async def ask(run: Run) -> None:
        async with admission.turn(run):
            await release.wait()

    first, second = (asyncio.ensure_future(ask(make_run(name))) for name in ("first", "second"))
    await asyncio.sleep(0)
    release.set()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    await first
    assert (admission.num_waiting, admission.num_tokens) == (0, 0)
