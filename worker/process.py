"""The process around a worker, the same for both roles.

1. Logging, failpoints, signals and the admin port: from here on it can be watched and stopped.
2. The model is loaded and the pool's memory taken, beside the event loop.
3. NATS, and the internal gRPC server's port. The caller builds its worker on them.
4. `Process.serve` starts it, prints the one line that says so, and waits for a signal.
5. Drain: the worker's phases, within the budget. Then everything closes, last opened first.

Exit status: 0 after a drain, 1 when the worker failed, and at a second signal.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from grpc import aio

from common import failpoints, rpc
from common.admin import AdminServer
from common.config import WorkerSettings, advertised, read_token
from common.listener import host_port
from common.logging import setup_logging
from common.nats_bus import NatsBus
from common.ready import announce
from common.telemetry import Telemetry
from common.tls import warn_if_open
from common.types import Role
from engine.loop import EngineLoop, EngineRuntime, OnEvents
from kv_transfer.base import TransportSettings
from kv_transfer.transfers import TransferThread
from worker.drain import Phase, StopSignals, shut_down
from worker.identity import Endpoints, WorkerIdentity, new_identity
from worker.introspection import Json
from worker.report import WorkerFacts
from worker.runtime import Compute, assemble

log = logging.getLogger(__name__)

# For what was put on a stream just before the end.
_LAST_WRITES_S = 0.5


class ServedWorker(Protocol):
    """What the process needs of a PrefillWorker or DecodeWorker."""

    async def start(self) -> None: ...

    async def run(self) -> None: ...

    async def stop(self) -> None: ...

    def is_ready(self) -> bool: ...

    def metrics(self) -> str: ...

    def drain_phases(self) -> Sequence[Phase]: ...

    async def debug_kv(self) -> Json: ...

    def debug_statistics(self) -> Json: ...

    def debug_steps(self) -> Json: ...


class _Pages:
    """The admin port's view of a worker, which comes later than the port."""

    def __init__(self) -> None:
        self.worker: ServedWorker | None = None

    def health(self) -> bool:
        return self.worker is not None and self.worker.is_ready()

    def metrics(self) -> str:
        return self.worker.metrics() if self.worker else ""

    async def kv(self) -> Json:
        return await self.worker.debug_kv() if self.worker else {}

    def statistics(self) -> Json:
        return self.worker.debug_statistics() if self.worker else {}

    def steps(self) -> Json:
        """The latest engine steps, their times on this machine's monotonic clock."""
        return self.worker.debug_steps() if self.worker else []


@dataclass(slots=True)
class Process:
    """What a worker is built on. ``server`` is bound, its services are the caller's to add."""

    settings: WorkerSettings
    identity: WorkerIdentity
    token: str
    telemetry: Telemetry
    bus: NatsBus
    compute: Compute
    transfers: TransferThread
    server: aio.Server
    endpoints: Endpoints
    signals: StopSignals
    pages: _Pages
    engine_failed: asyncio.Event = field(default_factory=asyncio.Event)

    def make_runtime(self, on_events: OnEvents) -> EngineRuntime:
        return EngineLoop(self.compute.engine, on_events, lambda _: self.engine_failed.set())

    def transport_settings(self) -> TransportSettings:
        settings = self.settings
        return TransportSettings(
            pool_dir=settings.pool_dir,
            host=settings.host,
            advertise_host=advertised(settings),
            insecure=settings.insecure_transfer,
            tls=settings.tls,
        )

    def facts(self, transports: Sequence[str], local_prefill: str = "") -> WorkerFacts:
        return WorkerFacts(
            identity=self.identity,
            endpoints=self.endpoints,
            model=self.compute.model.description,
            layout=self.compute.model.layout,
            num_blocks=self.compute.num_blocks,
            step_tokens=self.compute.engine.step_tokens,
            transports=tuple(transports),
            local_prefill=local_prefill,
            costs=self.compute.model.costs,
        )

    async def serve(self, worker: ServedWorker, services: Sequence[str]) -> int:
        """Runs ``worker`` until a signal; returns the exit status."""
        health = rpc.Health(self.server, services)
        if self.settings.reflection:
            rpc.enable_reflection(self.server, services)
        await worker.start()
        try:
            self.pages.worker = worker
            await health.set_ready(True)
            await self.server.start()
            running = asyncio.create_task(worker.run(), name="worker")
            try:
                identity, endpoints = self.identity, self.endpoints
                announce(identity.worker_id, identity.role.value, endpoints.grpc, endpoints.admin)
                failed = await self._until_stopped(running)
                await health.set_ready(False)
                if not failed:
                    await shut_down(worker.drain_phases(), self.settings.drain_budget_s)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        finally:
            await worker.stop()
        return 1 if failed else 0

    async def _until_stopped(self, running: asyncio.Task[None]) -> bool:
        """True: not by a signal, the worker failed."""
        asked = asyncio.create_task(self.signals.wait())
        broken = asyncio.create_task(self.engine_failed.wait())
        watched = (asked, broken)
        try:
            await asyncio.wait((*watched, running), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in watched:
                task.cancel()
            await asyncio.gather(*watched, return_exceptions=True)
        if running.done() and not running.cancelled():
            log.error("the worker failed", exc_info=running.exception())
        return running.done() or self.engine_failed.is_set()


@asynccontextmanager
async def open_process(settings: WorkerSettings, role: Role) -> AsyncIterator[Process]:
    """Raises ConfigError or ModelError for what cannot be used."""
    setup_logging(role.value, settings.log_level)
    failpoints.arm(settings.failpoints)
    token = read_token(settings.token_file, "token_file")
    warn_if_open(settings.host, settings.tls)
    identity = new_identity(settings, role)
    async with AsyncExitStack() as stack:
        on_second_signal: list[Callable[[], None]] = []
        signals = StopSignals(lambda: _leave(on_second_signal))
        signals.install()
        pages = _Pages()
        admin = AdminServer(
            settings.host,
            settings.admin_port,
            token,
            pages.health,
            pages.metrics,
            {"kv": pages.kv, "statistics": pages.statistics, "steps": pages.steps},
            settings.allow_failpoints,
        )
        admin_port = await admin.start()
        stack.push_async_callback(admin.stop)
        compute = await asyncio.to_thread(assemble, settings, identity)
        stack.callback(compute.memory.close)
        on_second_signal.append(compute.memory.close)
        transfers = TransferThread()
        stack.push_async_callback(_in_thread(transfers.close))
        telemetry = Telemetry(
            f"baton-{role.value}",
            identity.worker_id,
            settings.otlp_endpoint,
            asyncio.get_running_loop().time,
            read_token(settings.otlp_token_file, "otlp_token_file"),
        )
        stack.push_async_callback(telemetry.shutdown)
        # Waits for as long as there is no NATS.
        bus = await signals.unless_asked(
            NatsBus.connect(
                settings.nats_url, settings.nats_credentials_file, identity.worker_id, settings.tls
            )
        )
        stack.push_async_callback(bus.close)
        server = rpc.make_internal_server(token)
        stack.push_async_callback(server.stop, _LAST_WRITES_S)
        host = advertised(settings)
        port = rpc.bind(server, settings.host, settings.port, settings.tls)
        yield Process(
            settings=settings,
            identity=identity,
            token=token,
            telemetry=telemetry,
            bus=bus,
            compute=compute,
            transfers=transfers,
            server=server,
            endpoints=Endpoints(host_port(host, port), host_port(host, admin_port)),
            signals=signals,
            pages=pages,
        )


def _in_thread(call: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        await asyncio.to_thread(call)

    return run


def _leave(clean_ups: Sequence[Callable[[], None]]) -> None:
    """At once, but for the pool's file, which nobody else would remove for now."""
    for clean_up in clean_ups:
        clean_up()
    os._exit(1)
