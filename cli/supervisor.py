"""What `baton up` does between its first and its last line.

1. nats-server starts, then workers and gateways, all at once, each with its share of the cores;
2. every child has said that it is ready, and every gateway that a request would succeed;
3. a child that dies is started again, with growing pauses; nats-server too, on its old port;
4. workers are added and drained one by one, where somebody asks for it (cli/scaling.py);
5. on the way out gateways drain first, then workers, then nats-server stops.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from cli.child import Child, ChildSpec, Ready
from cli.readiness import wait_until_ready
from common.errors import BatonError, ConfigError, Unavailable
from common.nats_server import NatsServer

Report = Callable[[str], None]

_BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0)
# A child that lived this long died of something new.
_HEALTHY_S = 60.0
# What a process needs after its drain budget, to close what it holds.
_EXIT_S = 5.0


class Supervisor:
    """Owns all children. ``token`` is the run's. ``report`` is told what a user should know while
    they run; ``progress`` what it waits for until it is up; ``on_change`` that pids have changed.
    """

    def __init__(
        self,
        nats: NatsServer,
        workers: Sequence[ChildSpec],
        gateways: Sequence[ChildSpec],
        token: str,
        log_dir: Path,
        drain_budget_s: float,
        report: Report,
        progress: Report,
        on_change: Callable[[], None],
    ) -> None:
        self._nats = nats
        self._workers = [Child(spec, log_dir) for spec in workers]
        self._gateways = [Child(spec, log_dir) for spec in gateways]
        self._token = token
        self._grace_s = drain_budget_s + _EXIT_S
        self._report = report
        self._progress = progress
        self._on_change = on_change
        self._keepers: dict[Child, asyncio.Task[None]] = {}
        self._nats_keeper: asyncio.Task[None] | None = None
        self._log_dir = log_dir
        self._stopping = False

    @property
    def workers(self) -> list[Ready]:
        return [child.ready for child in self._workers if child.ready is not None]

    @property
    def worker_children(self) -> list[Child]:
        """In the order of their starts within each pool; some may be starting or draining."""
        return list(self._workers)

    @property
    def gateways(self) -> list[Ready]:
        return [child.ready for child in self._gateways if child.ready is not None]

    async def start(self) -> None:
        """Returns when a request to any gateway would succeed. Raises ConfigError or ChildFailed;
        `stop` is to be called then too."""
        children = (*self._workers, *self._gateways)
        waiting = [child.spec.label for child in children]

        async def start(child: Child) -> None:
            await child.start()
            waiting.remove(child.spec.label)
            if waiting:
                self._progress(f"waiting for {', '.join(waiting)}")

        self._progress(f"waiting for {', '.join(waiting)}")
        try:
            async with asyncio.TaskGroup() as group:
                for child in children:
                    group.create_task(start(child))
        except BaseExceptionGroup as group_error:
            raise _first(group_error) from None
        self._progress("waiting until gateways and workers know each other")
        expected = {worker.id for worker in self.workers}
        for gateway in self.gateways:
            await wait_until_ready(gateway.admin, self._token, expected)
        loop = asyncio.get_running_loop()
        self._keepers = {child: loop.create_task(self._keep(child)) for child in children}
        if hasattr(os, "pidfd_open"):
            self._nats_keeper = loop.create_task(self._keep_nats())

    async def add(self, spec: ChildSpec) -> Ready:
        """One worker more; returns when every gateway knows it. Raises Unavailable, ConfigError
        or ChildFailed, and then it is gone."""
        if self._stopping:
            raise Unavailable("`baton up` is stopping")
        child = Child(spec, self._log_dir)
        self._workers.append(child)
        try:
            ready = await child.start()
            for gateway in self.gateways:
                await wait_until_ready(gateway.admin, self._token, {ready.id})
        except BatonError:
            self._workers.remove(child)
            await child.stop(self._grace_s)
            raise
        self._keepers[child] = asyncio.create_task(self._keep(child))
        self._report(f"{_name(child)} is ready")
        self._changed()
        return ready

    async def drain(self, child: Child) -> int:
        """One worker less, which finishes or hands over what it has. Returns its exit status."""
        if (keeper := self._keepers.pop(child, None)) is not None:
            await _cancelled([keeper])
        status = await child.stop(self._grace_s)
        if child in self._workers:
            self._workers.remove(child)
        self._report(f"{_name(child)} {'has stopped' if status == 0 else _ending(status)}")
        self._changed()
        return status

    async def stop(self) -> None:
        """In order; never raises for what a child does."""
        self._stopping = True
        await _cancelled([*self._keepers.values(), self._nats_keeper])
        for group in (self._gateways, self._workers):
            await asyncio.gather(*(child.stop(self._grace_s) for child in list(group)))

    def kill(self) -> None:
        for child in (*self._gateways, *self._workers):
            child.signal(signal.SIGKILL)

    async def _keep(self, child: Child) -> None:
        loop = asyncio.get_running_loop()
        deaths = 0
        while True:
            started_s = loop.time()
            status = await child.wait()
            if loop.time() - started_s > _HEALTHY_S:
                deaths = 0
            self._report(f"{child.spec.label} {_ending(status)}; it is started again")
            await asyncio.sleep(_pause_s(deaths))
            deaths += 1
            await self._insist(child.start, f"{child.spec.label} did not start", deaths)
            self._report(f"{_name(child)} is ready")
            self._changed()

    async def _keep_nats(self) -> None:
        while True:
            await self._insist(lambda: _exit_of(self._nats.pid), "nats-server is not watched")
            self._report("nats-server has died; it is started again")
            await self._insist(self._restart_nats, "nats-server did not start")

    async def _restart_nats(self) -> None:
        self._nats.kill()
        self._nats.start()

    async def _insist(
        self, attempt: Callable[[], Awaitable[object]], failure: str, num_failures: int = 0
    ) -> None:
        """Returns once ``attempt`` has succeeded. Whatever it raises is reported and tried again:
        a keeper that ended by it would leave its process dead for good, without a word."""
        while True:
            try:
                await attempt()
                return
            except BatonError as error:
                self._report(error.message)
            except Exception as error:  # noqa: BLE001
                self._report(f"{failure}: {error!r}")
            await asyncio.sleep(_pause_s(num_failures))
            num_failures += 1

    def _changed(self) -> None:
        try:
            self._on_change()
        except OSError as error:
            self._report(f"other commands are not told of it: {error}")


def _pause_s(num_failures: int) -> float:
    return _BACKOFF_S[min(num_failures, len(_BACKOFF_S) - 1)]


async def _cancelled(tasks: Sequence[asyncio.Task[None] | None]) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _exit_of(pid: int) -> None:
    """Returns when the process has ended; it may be anybody's child."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """One of the errors of a group: what a user said wrong before what went wrong."""
    errors = [error for error in group.exceptions if isinstance(error, BatonError)]
    config = [error for error in errors if isinstance(error, ConfigError)]
    return next(iter((*config, *errors, *group.exceptions)))


def _name(child: Child) -> str:
    """As the user knows it, and as `baton status` and the logs do."""
    return f"{child.spec.label} ({child.ready.id})" if child.ready else child.spec.label


def _ending(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
