"""The engine's statistics as the event loop knows them.

The engine lives on its own thread, so its numbers are asked for there, between two steps. However
often `refresh` is called meanwhile, it asks once.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from common.types import StepRecord
from engine.engine import Engine
from engine.loop import EngineRuntime
from engine.statistics import EngineStatistics

_NUM_STEPS = 2048


class EngineSnapshot:
    """``on_refresh`` is called on the event loop after each refresh. ``steps`` are the latest."""

    def __init__(self, runtime: EngineRuntime, on_refresh: Callable[[], None]) -> None:
        self._runtime = runtime
        self._on_refresh = on_refresh
        self._wanted = asyncio.Event()
        self._waiting: list[Callable[[], None]] = []
        self._current: EngineStatistics | None = None
        self.steps: deque[StepRecord] = deque(maxlen=_NUM_STEPS)

    @property
    def current(self) -> EngineStatistics:
        assert self._current is not None, "read before start"
        return self._current

    async def start(self) -> None:
        self._current = await self._runtime.call(Engine.statistics)

    def refresh(self, then: Callable[[], None] | None = None) -> None:
        """``then`` is called once, with the first snapshot that was taken after this call."""
        if then is not None:
            self._waiting.append(then)
        self._wanted.set()

    def step_done(self, record: StepRecord | None) -> None:
        if record is not None:
            self.steps.append(record)
        self.refresh()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            waiting, self._waiting = self._waiting, []
            self._current = await self._runtime.call(Engine.statistics)
            for then in waiting:
                then()
            self._on_refresh()
