"""Prefill and decode ends in one process: oracle engines, loopback hand-off, real messages."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cli.otlp import OtlpReceiver, TraceSpan, spans_of
from common.config import DecodeSettings, PrefillSettings, WorkerSettings
from common.telemetry import Telemetry
from common.types import (
    BlockCounts,
    Role,
    SamplingParams,
)
from common.wire import sampling_to_proto
from common.wire import worker as wire
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.loop import EngineLoop, OnEvents
from engine.oracle import reference_ids
from kv_transfer.base import HostIdentity, TransportSettings
from kv_transfer.exports import Exports
from kv_transfer.imports import Imports
from kv_transfer.loopback import LoopbackControl
from kv_transfer.memory import PoolMemory, allocate_pool
from kv_transfer.registry import make_exporters, make_importers
from kv_transfer.transfers import TransferThread
from prefill_worker.worker import PrefillWorker
from worker.identity import Endpoints, WorkerIdentity
from worker.model import model_facts
from worker.report import WorkerFacts
from worker.runtime import make_engine

WAIT_S = 10.0
BLOCK = 4
PREFILL_ENDPOINT = "prefill:1"
HOST = HostIdentity("boot", "here")


async def until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s, "it did not come true"
        await asyncio.sleep(0.005)


def is_clean(counts: BlockCounts) -> bool:
    return not (counts.in_use or counts.leased or counts.importing)


def params(max_tokens: int = 8, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=7, temperature=0.0, **fields)  # type: ignore[arg-type]


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt * 131 + i * 7) % 512 for i in range(length)]


def right_ids(prompt_ids: Sequence[int], max_tokens: int = 8) -> list[int]:
    return reference_ids(prompt_ids, params(max_tokens), 512)


def state_of(
    request_id: str,
    attempt: int,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int] = (),
    sampling: SamplingParams | None = None,
    remaining_ms: int = 60_000,
) -> wire.SequenceState:
    return wire.SequenceState(
        request_id=request_id,
        attempt=attempt,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        sampling=sampling_to_proto(sampling or params()),
        remaining_ms=remaining_ms,
    )


@dataclass
class Side:
    """One worker's pool and engine, as a process has them."""

    settings: WorkerSettings
    identity: WorkerIdentity
    memory: PoolMemory
    engine: Engine
    loops: list[EngineLoop] = field(default_factory=list)

    def make_runtime(self, on_events: OnEvents) -> EngineLoop:
        loop = EngineLoop(self.engine, on_events)
        self.loops.append(loop)
        return loop

    def facts(self, endpoint: str) -> WorkerFacts:
        model = model_facts(self.settings)
        return WorkerFacts(
            identity=self.identity,
            endpoints=Endpoints(endpoint, "admin:1"),
            model=model.description,
            layout=model.layout,
            num_blocks=self.memory.num_blocks - 1,
            step_tokens=self.engine.step_tokens,
            transports=("loopback",),
        )

    async def counts(self) -> BlockCounts:
        return await self.loops[0].call(lambda engine: engine.statistics().blocks)

    async def until_clean(self) -> None:
        deadline_s = asyncio.get_running_loop().time() + WAIT_S
        while not is_clean(counts := await self.counts()):
            assert asyncio.get_running_loop().time() < deadline_s, counts
            await asyncio.sleep(0.005)
        assert counts.free + counts.cached == counts.total


def make_side(settings: WorkerSettings, role: Role, epoch: int, folder: Path) -> Side:
    model = model_facts(settings)
    identity = WorkerIdentity(f"{role.value}-1", role, epoch)
    assert settings.num_blocks is not None
    memory = allocate_pool(
        "plain", model.layout, settings.num_blocks + 1, folder, identity.worker_id, epoch
    )
    return Side(settings, identity, memory, make_engine(settings, model, memory))


@dataclass
class Rig:
    transport: TransportSettings
    transfers: TransferThread
    endpoints: dict[str, Exports]
    folder: Path

    def exports_of(self, side: Side, lease_s: float) -> Exports:
        exporters = make_exporters("loopback", side.memory, self.transport)
        exports = Exports(side.memory, exporters, self.transfers, PREFILL_ENDPOINT, lease_s)
        self.endpoints[PREFILL_ENDPOINT] = exports
        return exports

    def imports_of(self, side: Side) -> Imports:
        importers = make_importers("loopback", side.memory, self.transport)
        control = LoopbackControl(self.endpoints, side.identity.worker_id, HOST)
        return Imports(side.memory, importers, self.transfers, control, HOST)


@asynccontextmanager
async def open_rig(folder: Path) -> AsyncIterator[Rig]:
    transfers = TransferThread()
    try:
        yield Rig(TransportSettings(pool_dir=folder), transfers, {}, folder)
    finally:
        transfers.close()


OTLP_TOKEN = "a token"


def telemetry(otlp_endpoint: str | None = None) -> Telemetry:
    clock = asyncio.get_running_loop().time
    return Telemetry("test", "test", otlp_endpoint, clock, OTLP_TOKEN)


class AttemptSpan:
    """A gateway's attempt span, and what workers put under it, by a real OTLP receiver."""

    def __init__(self, receiver: OtlpReceiver, endpoint: str) -> None:
        self._receiver = receiver
        self.telemetry = telemetry(endpoint)
        self._span = self.telemetry.start_span("attempt")
        self.carrier = self._span.carrier
        self._spans: list[TraceSpan] = []

    async def collect(self) -> list[TraceSpan]:
        self._span.end()
        await self.telemetry.shutdown()
        trace = self._receiver.find(self._span.trace_id)
        assert trace is not None
        self._spans = spans_of(trace.resource_spans)
        return self._spans

    def children(self, name: str) -> list[str]:
        """Names of the children of all spans called ``name``."""
        parents = {span.span_id for span in self._spans if span.name == name}
        return [span.name for span in self._spans if span.parent_id in parents]


@asynccontextmanager
async def running(worker: PrefillWorker | DecodeWorker) -> AsyncIterator[None]:
    await worker.start()
    task = asyncio.ensure_future(worker.run())
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await worker.stop()


_BASE: dict[str, object] = {
    "model": "oracle",
    "block_size": BLOCK,
    "num_blocks": 64,
    "on_ledger_fault": "raise",
}


def prefill_settings(**fields: object) -> PrefillSettings:
    return PrefillSettings(**{**_BASE, **fields})  # type: ignore[arg-type]


def decode_settings(**fields: object) -> DecodeSettings:
    return DecodeSettings(**{**_BASE, **fields})  # type: ignore[arg-type]
