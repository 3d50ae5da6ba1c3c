"""A prefill worker and a small gateway on a real nats-server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common.bus import (
    REPORT_SUBJECTS,
    Message,
)
from common.nats_bus import NatsBus
from common.nats_server import NatsServer
from common.telemetry import Telemetry
from common.types import Role
from common.wire import offer_from_proto
from common.wire import worker as wire
from kv_transfer.exports import Exports
from kv_transfer.lease import LeaseKey, LeaseVerdict
from prefill_worker.worker import PrefillWorker
from tests.worker.peers import FakeGateway
from tests.worker.rig import (
    PREFILL_ENDPOINT,
    Side,
    make_side,
    open_rig,
    prefill_settings,
    running,
    telemetry,
    until,
)


@dataclass
class Setup:
    side: Side
    worker: PrefillWorker
    exports: Exports
    gateway: FakeGateway
    bus: NatsBus
    reports: list[wire.WorkerReport] = field(default_factory=list)

    @property
    def worker_id(self) -> str:
        return self.side.identity.worker_id

    async def until_clean(self) -> None:
        async with asyncio.timeout(10):
            await self.worker.serve_offers()
        await self.side.until_clean()
        await until(lambda: self.worker.statistics().jobs == 0)

    def release(self, offer: wire.Offer) -> LeaseVerdict:
        return self.exports.release(LeaseKey.of(offer_from_proto(offer)))


@asynccontextmanager
async def open_setup(
    nats: NatsServer,
    folder: Path,
    lease_s: float = 5.0,
    spans: Telemetry | None = None,
    **fields: object,
) -> AsyncIterator[Setup]:
    ours = await NatsBus.connect(nats.url, nats.credentials_file("gateway"), "gw-1")
    theirs = await NatsBus.connect(nats.url, nats.credentials_file("prefill"), "prefill-1")
    try:
        async with open_rig(folder) as rig:
            side = make_side(prefill_settings(**fields), Role.PREFILL, 11, folder)
            exports = rig.exports_of(side, lease_s)
            worker = PrefillWorker(
                side.facts(PREFILL_ENDPOINT),
                side.settings,  # type: ignore[arg-type]
                theirs,
                exports,
                side.make_runtime,
                spans or telemetry(),
            )
            gateway = FakeGateway(ours)
            setup = Setup(side, worker, exports, gateway, ours)

            async def reported(message: Message) -> None:
                setup.reports.append(wire.WorkerReport.FromString(message.data))

            await ours.subscribe(REPORT_SUBJECTS, reported)
            await ours.ensure_job_queue(60.0)
            await gateway.start()
            async with running(worker):
                await until(lambda: bool(setup.reports))
                yield setup
    finally:
        await theirs.close()
        await ours.close()
