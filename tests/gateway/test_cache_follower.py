"""A worker's cache as the gateway knows it, over a real nats-server, with a real engine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.engines import Rig, prompt_of, spec_of

from common.block_keys import chain_keys, key_prefix, root_key
from common.bus import MAX_MESSAGE_BYTES
from common.nats_bus import NatsBus
from common.nats_server import NatsServer
from common.types import EngineEvent, Role, StepRecord, WorkerId
from common.wire import worker as wire
from engine.block_events import MAX_SNAPSHOT_KEYS
from engine.engine import Engine
from engine.loop import EngineLoop
from gateway.cache_follower import CacheFollower
from gateway.prefix_index import PrefixIndex
from worker.identity import WorkerIdentity
from worker.kv_events import KvEventPublisher

BLOCK = 4
EPOCH = 5
ID = WorkerId("p1")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as running:
        yield running


@asynccontextmanager
async def bus_of(server: NatsServer, role: str) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(server.url, server.credentials_file(role), f"{role}-1")
    try:
        yield bus
    finally:
        await bus.close()


class Worker:
    """An engine on its thread, and the publisher that tells of its cache."""

    def __init__(self, bus: NatsBus) -> None:
        self.rig = Rig(num_blocks=16, block_size=BLOCK)
        self.loop = EngineLoop(self.rig.engine, self._on_events)
        identity = WorkerIdentity(ID, Role.PREFILL, EPOCH)
        self.publisher = KvEventPublisher(bus, identity, self.loop)
        self.idle = asyncio.Event()

    def _on_events(self, events: list[EngineEvent], record: StepRecord | None) -> None:
        self.publisher.changed()
        if any(getattr(event, "finish_reason", None) for event in events):
            self.idle.set()

    async def compute(self, seed: int, num_tokens: int = 16) -> tuple[int, ...]:
        """Runs a prompt to its end; returns the keys of its full blocks."""
        prompt = prompt_of(seed, num_tokens)
        self.idle.clear()
        self.loop.post(lambda engine: engine.add(spec_of(prompt)))
        async with asyncio.timeout(5):
            await self.idle.wait()
        fingerprint = self.rig.pool.fingerprint
        return tuple(map(key_prefix, chain_keys(root_key(fingerprint, "", ""), prompt, BLOCK)))

    async def keys(self) -> set[int]:
        return set(await self.loop.call(Engine.cached_keys))

    def report(self) -> wire.WorkerReport:
        load = wire.WorkerLoad(kv_events=self.publisher.number)
        return wire.WorkerReport(worker_id=ID, epoch=EPOCH, load=load)


@asynccontextmanager
async def worker_on(bus: NatsBus) -> AsyncIterator[Worker]:
    worker = Worker(bus)
    await worker.loop.start()
    publishing = asyncio.create_task(worker.publisher.run())
    try:
        yield worker
    finally:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        await worker.loop.stop()


@asynccontextmanager
async def follower_on(bus: NatsBus) -> AsyncIterator[tuple[CacheFollower, PrefixIndex]]:
    index = PrefixIndex()
    follower = CacheFollower(bus, index)
    await follower.start()
    try:
        yield follower, index
    finally:
        await follower.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(8):
        while not condition():
            await asyncio.sleep(0.01)


async def test_the_index_follows_stores_and_evictions(server: NatsServer) -> None:
    async with (
        bus_of(server, "gateway") as gateway,
        bus_of(server, "prefill") as prefill,
        worker_on(prefill) as worker,
        follower_on(gateway) as (follower, index),
    ):
        follower.report(worker.report())
        first = await worker.compute(1)
        await until(lambda: index.num_held(ID, first) == 4)
        # A pool of 16 blocks cannot keep them all.
        for seed in range(2, 9):
            last = await worker.compute(seed)
        await until(lambda: index.num_held(ID, last) == 4)
        right = await worker.keys()
        await until(lambda: index._caches[ID].keys == right)
        assert index.num_held(ID, first) == 0
        assert index.statistics().num_snapshots == 0
        # Idle: nothing more is said.
        number = worker.publisher.number
        await asyncio.sleep(0.2)
        assert worker.publisher.number == number


async def test_a_gateway_that_starts_later_asks_for_a_snapshot(server: NatsServer) -> None:
    async with (
        bus_of(server, "prefill") as prefill,
        worker_on(prefill) as worker,
        bus_of(server, "gateway") as gateway,
    ):
        first = await worker.compute(1)
        await until(lambda: worker.publisher.number > 0)
        async with follower_on(gateway) as (follower, index):
            follower.report(worker.report())
            await until(lambda: index.num_held(ID, first) == 4)
            assert index.statistics().num_snapshots == 1
            second = await worker.compute(2)
            await until(lambda: index.num_held(ID, second) == 4)
            assert index.statistics().num_snapshots == 1


async def test_messages_that_were_lost_are_made_up_for(server: NatsServer) -> None:
    """The worker says something while nobody hears it; its next report has the number. Then our
    own link is lost, which nobody's report tells."""
    async with (
        bus_of(server, "prefill") as prefill,
        worker_on(prefill) as worker,
        bus_of(server, "gateway") as gateway,
    ):
        index = PrefixIndex()
        assert not index.report(ID, EPOCH, 0)
        keys = await worker.compute(1)
        await until(lambda: worker.publisher.number > 0)
        follower = CacheFollower(gateway, index)
        await follower.start()
        assert index.num_held(ID, keys) == 0
        follower.report(worker.report())
        await until(lambda: index.num_held(ID, keys) == 4)
        follower.reconnected()
        assert index.num_held(ID, keys) == 0
        await until(lambda: index.num_held(ID, keys) == 4)
        follower.leave(ID)
        await follower.close()
        assert index.statistics().num_keys == 0


async def test_the_largest_snapshot_fits_into_a_message() -> None:
    keys = range((1 << 64) - MAX_SNAPSHOT_KEYS, 1 << 64)
    snapshot = wire.KvSnapshot(epoch=(1 << 64) - 1, number=(1 << 64) - 1, keys=keys)
    assert snapshot.ByteSize() < MAX_MESSAGE_BYTES / 2
