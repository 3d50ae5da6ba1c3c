"""An event loop whose time is made: it jumps to the next timer instead of waiting for it.

Nothing that runs on it may do I/O or use threads; then a run is a pure function of its seed.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Never waits: what would be waiting moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("deadlock: nothing is scheduled and nothing can happen")
        self.now_s += max(0.0, timeout)
        return []


class VirtualClockLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)
        # Timers closer than this fire together; asyncio would otherwise spin on rounding.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jump.now_s


def run(work: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Runs ``work`` on a fresh virtual clock; TimeoutError after ``limit_s`` of made time."""
    loop = VirtualClockLoop()
    try:
        return loop.run_until_complete(asyncio.wait_for(work, limit_s))
    finally:
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        if pending:
            loop.run_until_complete(asyncio.wait(pending))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
