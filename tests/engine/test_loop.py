"""The engine thread and its bridge: order, waking, failures and the end."""

import asyncio
import threading
from dataclasses import replace

import pytest
from support.engines import SEEDED, Rig, prompt_of, right_ids, spec_of

from common.errors import InvalidRequest
from common.types import EngineEvent, SequenceOutput, StepRecord
from engine.batch import Batch
from engine.engine import Engine
from engine.loop import EngineLoop, EngineStopped
from engine.oracle import OracleRunner
from engine.runner import StepHandle


class Listener:
    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.calls = 0
        self.threads: set[int] = set()
        self.ended = asyncio.Event()
        self.fatal: list[Exception] = []

    def on_events(self, events: list[EngineEvent], record: StepRecord | None) -> None:
        self.calls += 1
        self.threads.add(threading.get_ident())
        self.events += events
        if any(isinstance(e, SequenceOutput) and e.finish_reason for e in events):
            self.ended.set()

    def on_fatal(self, error: Exception) -> None:
        self.fatal.append(error)

    def ids(self) -> list[int]:
        return [i for e in self.events if isinstance(e, SequenceOutput) for i in e.token_ids]


@pytest.mark.parametrize("depth", [0, 1])
async def test_events_come_on_the_event_loop_once_a_step(depth: int) -> None:
    listener, rig = Listener(), Rig(async_depth=depth)
    loop = EngineLoop(rig.engine, listener.on_events)
    await loop.start()
    spec = spec_of(prompt_of(1, 9), SEEDED)
    await loop.call(lambda engine: engine.add(spec))
    await listener.ended.wait()
    assert listener.ids() == right_ids(spec)
    assert listener.threads == {threading.get_ident()}
    # An idle engine wakes up again, and is not taken for one that hangs.
    await asyncio.sleep(0.02)
    assert loop.step_age_s() == 0.0
    listener.ended.clear()
    second = spec_of(prompt_of(2, 9), SEEDED)
    loop.post(lambda engine: engine.add(second))
    await listener.ended.wait()
    assert listener.ids()[len(right_ids(spec)) :] == right_ids(second)
    statistics = await loop.call(Engine.statistics)
    assert listener.calls == statistics.num_steps == 32
    await loop.stop()
    rig.assert_idle()


async def test_calls_and_posts_run_in_order() -> None:
    loop = EngineLoop(Rig().engine, Listener().on_events)
    await loop.start()
    seen: list[int] = []
    for number in range(50):
        loop.post(lambda engine, number=number: seen.append(number))
    assert await loop.call(lambda engine: len(seen)) == 50
    assert seen == list(range(50))
    await loop.stop()


async def test_a_sequence_that_waits_for_a_lease_is_woken_by_its_release() -> None:
    listener, rig = Listener(), Rig(5)
    loop = EngineLoop(rig.engine, listener.on_events)
    await loop.start()
    holder = spec_of(prompt_of(1, 12), SEEDED, prefill_only=True)
    waiter = spec_of(prompt_of(2, 12), replace(SEEDED, max_tokens=3))
    await loop.call(lambda engine: engine.add(holder))
    await loop.call(lambda engine: engine.add(waiter))
    await asyncio.sleep(0.02)
    assert loop.step_age_s() == 0.0
    assert not listener.ended.is_set()
    loop.post(lambda engine: engine.release_lease(holder.seq_id))
    await listener.ended.wait()
    assert listener.ids()[1:] == right_ids(waiter)
    await loop.stop()
    rig.assert_idle()


async def test_a_typed_error_is_the_callers_alone() -> None:
    loop = EngineLoop(Rig().engine, Listener().on_events)
    await loop.start()

    def refuse(engine: Engine) -> None:
        raise InvalidRequest("field", "no")

    with pytest.raises(InvalidRequest):
        await loop.call(refuse)
    assert (await loop.call(Engine.statistics)).num_steps == 0
    await loop.stop()


class BrokenRunner:
    def __init__(self, oracle: OracleRunner) -> None:
        self._oracle = oracle

    @property
    def vocab_size(self) -> int:
        return self._oracle.vocab_size

    def launch(self, batch: Batch) -> StepHandle:
        raise RuntimeError("broken")

    def copy_block(self, source: int, target: int) -> None:
        self._oracle.copy_block(source, target)


async def test_a_broken_step_surfaces_and_fails_every_call() -> None:
    listener = Listener()
    loop = EngineLoop(Rig(wrap=BrokenRunner).engine, listener.on_events, listener.on_fatal)
    await loop.start()
    gate = threading.Event()
    loop.post(lambda engine: engine.add(spec_of(prompt_of(1, 4), SEEDED)))
    loop.post(lambda engine: gate.wait(5))
    waiting = asyncio.create_task(loop.call(lambda engine: engine.step()))
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(EngineStopped):
        await waiting
    assert [str(error) for error in listener.fatal] == ["broken"]
    with pytest.raises(EngineStopped):
        await loop.call(Engine.statistics)
    loop.post(Engine.statistics)
    await loop.stop()


async def test_a_cancelled_call_harms_nobody() -> None:
    loop = EngineLoop(Rig().engine, Listener().on_events)
    await loop.start()
    gate = threading.Event()
    loop.post(lambda engine: gate.wait(5))
    ran: list[int] = []
    cancelled = asyncio.create_task(loop.call(lambda engine: ran.append(1)))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    gate.set()
    assert (await loop.call(Engine.statistics)).num_running == 0
    assert ran == []
    await loop.stop()


async def test_a_step_that_hangs_shows_in_its_age() -> None:
    loop = EngineLoop(Rig().engine, Listener().on_events)
    await loop.start()
    gate = threading.Event()
    loop.post(lambda engine: gate.wait(5))
    await asyncio.sleep(0.05)
    assert loop.step_age_s() > 0.02
    gate.set()
    await loop.call(Engine.statistics)
    await loop.stop()


async def test_stop_before_start_and_twice() -> None:
    loop = EngineLoop(Rig().engine, Listener().on_events)
    await loop.stop()
    await loop.start()
    await loop.stop()
    await loop.stop()
