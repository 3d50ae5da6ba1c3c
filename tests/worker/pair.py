"""A decode worker, and an exporter that it fetches from."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from common.bus import Handler
from common.telemetry import Telemetry
from common.types import Role
from common.wire import worker as wire
from decode_worker.worker import DecodeWorker
from tests.worker.peers import Exporter, Stream
from tests.worker.rig import (
    Side,
    decode_settings,
    make_side,
    open_rig,
    params,
    prefill_settings,
    running,
    state_of,
    telemetry,
    until,
)


class ReportBus:
    """The part of a bus that a decode worker uses: it reports, and is asked to."""

    connected = True
    connected_for_s = 10.0

    def __init__(self) -> None:
        self.reports: list[wire.WorkerReport] = []

    async def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self.reports.append(wire.WorkerReport.FromString(data))

    async def subscribe(self, subject: str, handler: Handler) -> None: ...


@dataclass
class Pair:
    exporter: Exporter
    decode: Side
    worker: DecodeWorker
    bus: ReportBus

    async def until_clean(self) -> None:
        """Nothing in use, leased or importing on either side, and no promise left."""
        async with asyncio.timeout(10):
            await self.exporter.exports.wait_none()
        await self.decode.until_clean()
        await self.exporter.side.until_clean()
        await until(lambda: self.worker.statistics().reservations.promised_blocks == 0)
        assert self.worker.statistics().sequences == 0


@asynccontextmanager
async def open_pair(
    folder: Path, lease_s: float = 5.0, spans: Telemetry | None = None, **decode_fields: object
) -> AsyncIterator[Pair]:
    async with open_rig(folder) as rig:
        prefill = make_side(prefill_settings(), Role.PREFILL, 11, folder)
        exporter = Exporter(prefill, rig.exports_of(prefill, lease_s))
        decode = make_side(decode_settings(**decode_fields), Role.DECODE, 12, folder)
        bus = ReportBus()
        worker = DecodeWorker(
            decode.facts("decode:1"),
            decode.settings,  # type: ignore[arg-type]
            bus,  # type: ignore[arg-type]
            rig.imports_of(decode),
            decode.make_runtime,
            spans or telemetry(),
        )
        await exporter.start()
        try:
            async with running(worker):
                yield Pair(exporter, decode, worker, bus)
        finally:
            await exporter.stop()


async def hand_off(
    pair: Pair,
    stream: Stream,
    name: str,
    prompt_ids: list[int],
    max_tokens: int = 8,
    carrier: Mapping[str, str] | None = None,
) -> int:
    """Reserve, prefill elsewhere, Start. Returns the first token."""
    stream.reserve(name, 1, len(prompt_ids) // 4 + 2)
    await stream.granted(name)
    state = state_of(name, 1, prompt_ids, sampling=params(max_tokens))
    first, offer = await pair.exporter.prefill(state)
    state.output_ids.append(first)
    state.trace_context.update(carrier or {})
    stream.start(state, offer)
    return first
