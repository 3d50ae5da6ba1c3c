"""Where the blocking half of a hand-off runs: one thread a worker, one call after the other.

Copies, checksums and connecting to a pool's file block their caller for up to many milliseconds,
so they never run on the event loop. ``submit`` answers with a future of ``concurrent.futures``:
its end means that the call has really returned, which is what a quarantine waits for.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class TransferRunner(Protocol):
    def submit(self, call: Callable[[], T]) -> Future[T]: ...

    def close(self) -> None:
        """Returns once the last call has returned."""


class TransferThread:
    """The real one."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-transfer")

    def submit(self, call: Callable[[], T]) -> Future[T]:
        return self._executor.submit(call)

    def close(self) -> None:
        self._executor.shutdown(wait=True)


class InlineTransfers:
    """Runs a call where it is submitted: for a simulation, whose time only its own loop moves."""

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - as an executor does, for whoever awaits
            future.set_exception(error)
        return future

    def close(self) -> None: ...
