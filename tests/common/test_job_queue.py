"""A job queue of which only the stream is there: jobs go in, and no worker could fetch them."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.js import JetStreamContext

from common import nats_bus
from common.bus import JOB_CONSUMER, JOB_STREAM, BusTimeout
from common.nats_bus import NatsBus
from common.nats_server import NatsServer
from tests.common.test_nats_bus import connected

FETCH_S = 5.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats", roles={"gateway": {}, "worker": {}}) as running:
        yield running


def slow_once(monkeypatch: pytest.MonkeyPatch, pause_s: float) -> asyncio.Event:
    """The next creation pauses where the stream is there and its consumer is not; the event says
    that it has come to there."""
    stream_is_there, add_consumer = asyncio.Event(), JetStreamContext.add_consumer

    async def slow(*args: Any, **kwargs: Any) -> Any:
        if not stream_is_there.is_set():
            stream_is_there.set()
            await asyncio.sleep(pause_s)
        return await add_consumer(*args, **kwargs)

    monkeypatch.setattr(JetStreamContext, "add_consumer", slow)
    return stream_is_there


async def ensure_and_leave(bus: NatsBus, stream_is_there: asyncio.Event) -> None:
    ensuring = asyncio.create_task(bus.ensure_job_queue(600))
    await stream_is_there.wait()
    ensuring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ensuring


async def test_creation_goes_on_without_its_caller(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It publishes nothing itself; who found the stream does."""
    stream_is_there = slow_once(monkeypatch, 0.2)
    async with connected(server, "g1") as leaving, connected(server, "g2") as other:
        await ensure_and_leave(leaving, stream_is_there)
        await other.publish_job(b"j", "r:1")
        job = await other.fetch_job(FETCH_S)
        assert job is not None and job.data == b"j"


async def test_creation_that_fails_without_its_caller_is_no_traceback(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream_is_there = asyncio.Event()

    async def fail(*_args: Any, **_kwargs: Any) -> None:
        stream_is_there.set()
        await asyncio.sleep(0.1)
        raise TimeoutError

    monkeypatch.setattr(JetStreamContext, "add_consumer", fail)
    async with connected(server, "g") as bus:
        await ensure_and_leave(bus, stream_is_there)
        await asyncio.sleep(0.3)
        gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("how", ["its caller left", "its time was over"])
async def test_the_next_publish_makes_the_queue_whole(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    stream_is_there = slow_once(monkeypatch, 60.0)
    async with connected(server, "g") as gateway, connected(server, "w") as worker:
        if how == "its caller left":
            await ensure_and_leave(gateway, stream_is_there)
        else:
            with pytest.raises(BusTimeout):
                await gateway.ensure_job_queue(600)
        await gateway.publish_job(b"j", "r:1")
        job = await worker.fetch_job(FETCH_S)
        assert job is not None and job.data == b"j"


async def test_a_consumer_that_was_lost_is_made_again(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_bus, "_QUEUE_IS_KNOWN_S", 0.5, raising=False)
    async with connected(server, "g") as gateway, connected(server, "w") as worker:
        await gateway.ensure_job_queue(600)
        assert await worker.fetch_job(0.2) is None
        assert await gateway._stream.delete_consumer(JOB_STREAM, JOB_CONSUMER)
        assert await worker.fetch_job(0.6) is None
        await gateway.publish_job(b"j", "r:1")
        job = await worker.fetch_job(FETCH_S)
        assert job is not None and job.data == b"j"
