"""An engine without a thread: its steps are timers of the made clock; commands wait for them."""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from sim.network import Host

from common.types import EngineEvent, StepRecord
from engine.engine import Engine
from engine.loop import OnEvents
from kv_transfer.transfers import TransferRunner

T = TypeVar("T")
STEP_S = 0.002


class InlineRuntime:
    """What `EngineLoop` is, to a worker. Commands run between steps, in order; events reach the
    event loop a little later, when the engine may already be in its next step."""

    def __init__(
        self,
        engine: Engine,
        on_events: OnEvents,
        host: Host,
        rng: random.Random,
        look: Callable[[], None],
    ) -> None:
        self.engine = engine
        self._on_events = on_events
        self._host = host
        self._rng = rng
        self._look = look
        self._inbox: deque[Callable[[Engine], object]] = deque()
        self._outbox: deque[tuple[list[EngineEvent], StepRecord | None]] = deque()
        self._pumping = False

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def call(self, fn: Callable[[Engine], T]) -> T:
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run(engine: Engine) -> None:
            value = fn(engine)
            if not result.done():
                result.set_result(value)

        self.post(run)
        return await result

    def post(self, fn: Callable[[Engine], object]) -> None:
        self._inbox.append(fn)
        self._schedule(0.0)

    def step_age_s(self) -> float:
        return 0.0

    def _schedule(self, delay_s: float) -> None:
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_later(delay_s, self._pump)

    def _pump(self) -> None:
        self._pumping = False
        if not self._host.alive:
            return
        while self._inbox:
            self._inbox.popleft()(self.engine)
            self._look()
        if not self.engine.has_work:
            return
        self._outbox.append(self.engine.step())
        self._look()
        loop = asyncio.get_running_loop()
        loop.call_later(self._rng.uniform(0.0, STEP_S), self._deliver)
        self._schedule(self._rng.uniform(0.2, 1.0) * STEP_S)

    def _deliver(self) -> None:
        """In the order of the steps, however the timers fall."""
        if self._outbox and self._host.alive:
            self._on_events(*self._outbox.popleft())


class SlowTransfers(TransferRunner):
    """A transfer thread's work at made times: a copy reads its source somewhere within its time,
    so whatever is freed or reused under it shows."""

    def __init__(self, rng: random.Random, slow: float) -> None:
        self._rng = rng
        self._slow = slow

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        loop = asyncio.get_running_loop()
        total_s = self._rng.uniform(0.0, 0.003)
        if self._rng.random() < self._slow:
            total_s = self._rng.uniform(0.0, 6.0)

        def finish(outcome: T | Exception) -> None:
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        def run() -> None:
            outcome: T | Exception
            if not future.set_running_or_notify_cancel():
                return
            try:
                outcome = call()
            except Exception as error:  # noqa: BLE001 - as an executor does
                outcome = error
            loop.call_later(total_s / 2, finish, outcome)

        loop.call_later(total_s / 2, run)
        return future

    def close(self) -> None: ...
