"""The engine's thread and its bridge to one event loop.

::

    event loop                                   engine thread
    ----------                                   -------------
    call(fn), post(fn)   ------ inbox ------>    1. run what is in the inbox, in order
    on_events(...)       <-- once a step ----    2. one step, while the engine has work
    result of call       <-------------------    3. else sleep until something is in the inbox

An exception on the engine thread leaves state half changed, so it ends the loop: it is logged,
``on_fatal`` is told, and every call, waiting or later, raises `EngineStopped`. A typed error that
the function of a ``call`` raises is its caller's alone.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from common.errors import BatonError, InternalError
from common.types import EngineEvent, StepRecord
from engine.engine import Engine

log = logging.getLogger(__name__)

T = TypeVar("T")
OnEvents = Callable[[list[EngineEvent], StepRecord | None], None]
OnFatal = Callable[[Exception], None]


class EngineStopped(InternalError):
    """The engine's thread has ended; nothing more runs on it."""


class EngineRuntime(Protocol):
    """What a worker uses of an engine; all methods are for the event loop's thread."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def call(self, fn: Callable[[Engine], T]) -> T:
        """Runs ``fn`` between two steps and gives its result."""
        ...

    def post(self, fn: Callable[[Engine], object]) -> None:
        """Has ``fn`` run between two steps, in the order of posts and calls."""
        ...

    def step_age_s(self) -> float:
        """Seconds since the engine thread last finished something, while it has work; else 0."""
        ...


@dataclass(slots=True)
class _Command:
    run: Callable[[Engine], None]
    fail: Callable[[Exception], None]


class EngineLoop:
    """``on_events`` and ``on_fatal`` are called on the event loop that called ``start``."""

    def __init__(
        self,
        engine: Engine,
        on_events: OnEvents,
        on_fatal: OnFatal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._on_events = on_events
        self._on_fatal = on_fatal
        self._clock = clock
        self._inbox: SimpleQueue[_Command | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        # The command that the thread is running.
        self._current: _Command | None = None
        # Set on the event loop once the thread takes nothing more out of the inbox.
        self._is_over = False
        # When the thread last finished a step or a command; None while it sleeps.
        self._busy_since_s: float | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after the step that it is in. Waits as long as that step takes."""
        if self._thread.ident is None:
            return
        self._inbox.put(None)
        await self._stopped.wait()

    async def call(self, fn: Callable[[Engine], T]) -> T:
        """Raises what a BatonError ``fn`` raised, or EngineStopped."""
        result: Future[T] = Future()

        def run(engine: Engine) -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(fn(engine))
                except BatonError as error:
                    result.set_exception(error)

        self._submit(_Command(run, result.set_exception))
        return await asyncio.wrap_future(result)

    def post(self, fn: Callable[[Engine], object]) -> None:
        """Posts after the end are dropped: there is nothing left that they could change."""

        def run(engine: Engine) -> None:
            fn(engine)

        self._submit(_Command(run, lambda error: None))

    def step_age_s(self) -> float:
        busy_since_s = self._busy_since_s
        return 0.0 if busy_since_s is None else self._clock() - busy_since_s

    def _submit(self, command: _Command) -> None:
        if self._is_over:
            command.fail(EngineStopped("the engine has stopped"))
        else:
            self._inbox.put(command)

    # ------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        assert self._loop is not None
        fatal: Exception | None = None
        try:
            self._serve(self._loop)
        except Exception as error:
            log.exception("the engine failed")
            fatal = error
        self._busy_since_s = None
        self._loop.call_soon_threadsafe(self._end, fatal)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._take_commands():
            if self._engine.has_work:
                events, record = self._engine.step()
                if events or record is not None:
                    loop.call_soon_threadsafe(self._on_events, events, record)

    def _take_commands(self) -> bool:
        """Runs all that is in the inbox, and waits for something when there is no other work.
        False: stop."""
        while True:
            self._busy_since_s = self._clock()
            try:
                if self._engine.has_work:
                    command = self._inbox.get_nowait()
                else:
                    self._busy_since_s = None
                    command = self._inbox.get()
                    self._busy_since_s = self._clock()
            except Empty:
                return True
            if command is None:
                return False
            self._current = command
            command.run(self._engine)
            self._current = None

    # ------------------------------------------------------------ the end, on the event loop

    def _end(self, fatal: Exception | None) -> None:
        self._is_over = True
        unfinished = [self._current] if self._current is not None else []
        while not self._inbox.empty():
            command = self._inbox.get_nowait()
            if command is not None:
                unfinished.append(command)
        for command in unfinished:
            command.fail(EngineStopped("the engine has stopped"))
        self._stopped.set()
        if fatal is not None and self._on_fatal is not None:
            self._on_fatal(fatal)
