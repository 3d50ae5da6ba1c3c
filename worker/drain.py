"""How a worker goes: a list of named phases, and the signals that start it.

Each phase has until a share of the drain budget to end by itself, then the next one begins: what a
phase leaves undone the next one ends harder. A phase that fails does not keep the later ones from
running. A second signal skips all of it.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Phase:
    """``until``: share of the drain budget, counted from the start of the drain."""

    name: str
    run: Callable[[], Awaitable[None]]
    until: float = 1.0


async def shut_down(phases: Sequence[Phase], budget_s: float) -> None:
    start_s = asyncio.get_running_loop().time()
    for phase in phases:
        log.info("shutdown: %s", phase.name)
        try:
            async with asyncio.timeout_at(start_s + phase.until * budget_s):
                await phase.run()
        except TimeoutError:
            log.warning("shutdown: %s was cut short", phase.name)
        except Exception:
            log.exception("shutdown: %s failed", phase.name)


class StopSignals:
    """The first SIGTERM or SIGINT ends `wait` and `unless_asked`; at the second ``leave`` is
    called."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self._asked = asyncio.Event()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received)

    async def wait(self) -> None:
        await self._asked.wait()

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """``work``'s result. Where a signal comes first there is nothing yet to drain: it is
        cancelled, and SystemExit leaves the process in good order."""
        working = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait((working, asked), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                log.info("stopped before it was ready")
                raise SystemExit(0)
            return working.result()
        finally:
            for task in (working, asked):
                task.cancel()
            await asyncio.gather(working, asked, return_exceptions=True)

    def _received(self) -> None:
        if self._asked.is_set():
            self._leave()
        self._asked.set()
