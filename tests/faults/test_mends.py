"""What was found while this matrix was built, one test a kind (docs/log.md has the list)."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from common.bus import Message
from common.nats_bus import NatsBus
from common.nats_server import NatsServer
from common.wire import worker as wire
from gateway.app import InternalChannels
from gateway.offers import OfferKeeper
from gateway.registry import WorkerRegistry
from kv_transfer.lease import LeaseKey, LeaseVerdict
from kv_transfer.renewal import Renewer
from tests.gateway.test_books import report


class Offers:
    """An exporter's side that counts."""

    def __init__(self) -> None:
        self.num_renewals = 0

    async def renew(self, offer: wire.Offer) -> bool:
        self.num_renewals += 1
        return True

    async def release(self, offer: wire.Offer) -> None: ...

    def keep(self, endpoints: object) -> None: ...


async def test_a_lease_of_no_time_is_not_renewed_without_pause() -> None:
    """A worker that lies about its leases must not keep the gateway's loop busy."""
    offers = Offers()
    async with OfferKeeper(offers).kept(wire.Offer(lease_ms=0)):
        await asyncio.sleep(0.35)
    assert 1 <= offers.num_renewals <= 4


async def test_nor_by_the_claimer() -> None:
    class Control:
        num_calls = 0

        async def renew(self, endpoint: str, keys: Sequence[LeaseKey]) -> tuple[LeaseVerdict, ...]:
            self.num_calls += 1
            return tuple(LeaseVerdict.OK for _ in keys)

    control = Control()
    renewer = Renewer(control)
    renewer.hold("peer", LeaseKey("a", b"s", 1, 1), 0.0, lambda verdict: None)
    await asyncio.sleep(0.35)
    await renewer.close()
    assert 1 <= control.num_calls <= 4


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[tuple[NatsServer, NatsBus]]:
    server = NatsServer(tmp_path / "nats")
    server.start()
    bus = await NatsBus.connect(server.url, server.credentials_file("prefill"), "p1")
    yield server, bus
    await bus.close()
    server.stop()


@pytest.mark.fault("F11")
async def test_a_subscription_made_while_nats_stands_still_ends_nobody(
    bus: tuple[NatsServer, NatsBus],
) -> None:
    """Workers subscribe as they start; an error there ended the worker."""
    server, link = bus
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def on_message(message: Message) -> None:
        heard.put_nowait(message.data)

    os.kill(server.pid, signal.SIGSTOP)
    try:
        await link.subscribe("baton.discover", on_message)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    gateway = await NatsBus.connect(server.url, server.credentials_file("gateway"), "g1")
    try:
        async with asyncio.timeout(10):
            while heard.empty():
                await gateway.publish("baton.discover", b"who is there")
                await asyncio.sleep(0.1)
    finally:
        await gateway.close()


class Books:
    """A registry on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.forgotten: list[tuple[str, int]] = []
        self.registry = WorkerRegistry(
            3.0,
            lambda: self.now_s,
            on_join=lambda entry: None,
            on_leave=lambda worker_id, died: None,
            on_orphan=lambda request_id, attempt: None,
            on_forgotten=lambda request_id, attempt: self.forgotten.append((request_id, attempt)),
        )

    def hear(self, after_s: float, *owned: str) -> None:
        self.now_s += after_s
        message = report("d1", role="decode", epoch=1)
        for request_id in owned:
            message.load.owned.add(request_id=request_id, attempt=1)
        self.registry.report(message)


def test_a_decode_worker_that_forgot_a_request_is_not_waited_for() -> None:
    """The request would have waited for its deadline."""
    books = Books()
    books.registry.started("r1", 1, "d1")
    books.registry.started("r2", 1, "d1")
    books.hear(0.0, "r2")
    books.hear(0.1, "r2")
    books.hear(2.0, "r2")
    assert books.forgotten == []
    books.hear(1.0, "r2")
    assert books.forgotten == [("r1", 1)]
    books.registry.ended("r2", 1)
    books.hear(1.0)
    books.hear(4.0)
    assert books.forgotten == [("r1", 1)]


def test_a_start_that_is_slow_to_arrive_is_not_forgotten() -> None:
    books = Books()
    books.registry.started("r1", 1, "d1")
    for after_s in (0.1, 0.1, 2.0):
        books.hear(after_s)
    books.hear(0.5, "r1")
    books.hear(5.0, "r1")
    assert books.forgotten == []


async def test_channels_to_workers_that_are_gone_are_closed() -> None:
    """Each restart of a worker left one behind, for ever."""
    channels = InternalChannels("token", None)
    for number in range(50):
        endpoint = f"127.0.0.1:{20_000 + number}"
        channels._channel(endpoint)
    channels.keep({"127.0.0.1:20007"})
    assert channels._channels.keys() == {"127.0.0.1:20007"}
    channels.keep(frozenset())
    assert not channels._channels
    await channels.close()
    assert not channels._closing
