"""An event loop whose time is made: it jumps to the next timer instead of waiting for it.

Nothing that runs on it may do I/O or use threads; then a run is a pure function of its seed.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heappop, heappush
from typing import Any, TypeVar

T = TypeVar("T")

# Timers closer than this fire together; a rounded sum must not come before what it was made of.
RESOLUTION_S = 1e-9


class _Call:
    """What asyncio's Handle and TimerHandle are to the rest of asyncio, and no more."""

    __slots__ = ("_args", "_callback", "_cancelled", "_context", "_when_s")

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
        when_s: float,
    ) -> None:
        self._callback = callback
        self._args = args
        self._context = copy_context() if context is None else context
        self._when_s = when_s
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._args = ()  # may hold what is to be closed now

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self._when_s


class VirtualClockLoop(asyncio.BaseEventLoop):
    """A turn does what a turn of asyncio's own loop does, in the same order, but for I/O and the
    wait. Most of a schedule is turns with one short call, so they are made cheap."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._calls: deque[_Call] = deque()
        # Timers, the earliest first; of equals the one that was set first.
        self._timers: list[tuple[float, int, _Call]] = []
        self._numbers = itertools.count()

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Call:
        call = _Call(callback, args, context, self._now_s)
        self._calls.append(call)
        return call

    call_soon_threadsafe = call_soon  # type: ignore[assignment] # there is one thread

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> _Call:
        call = _Call(callback, args, context, when)
        heappush(self._timers, (when, next(self._numbers), call))
        return call

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> _Call:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        calls, timers = self._calls, self._timers
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not calls:
            if not timers:
                raise AssertionError("deadlock: nothing is scheduled and nothing can happen")
            self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] < self._now_s + RESOLUTION_S:
            calls.append(heappop(timers)[2])
        for _ in range(len(calls)):
            call = calls.popleft()
            if call._cancelled:
                continue
            try:
                call._context.run(call._callback, *call._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - as asyncio's own loop does
                self.call_exception_handler(
                    {"message": f"exception in {call._callback!r}", "exception": error}
                )


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
