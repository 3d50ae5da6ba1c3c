"""NatsBus against a real nats-server: killed, restarted, frozen, full, gone."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from common.bus import (
    MAX_MESSAGE_BYTES,
    BusTimeout,
    Message,
    MessageTooLarge,
    NoResponders,
    QueueFull,
)
from common.errors import ConfigError
from common.nats_bus import MAX_QUEUED_JOBS, NatsBus
from common.nats_server import NatsServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    # The bus itself knows no roles; what they may is tested in test_nats_permissions.py.
    with NatsServer(tmp_path / "nats", roles={"gateway": {}, "worker": {}}) as running:
        yield running


@asynccontextmanager
async def connected(server: NatsServer, name: str, role: str = "worker") -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(server.url, server.credentials_file(role), name)
    try:
        yield bus
    finally:
        await bus.close()


async def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come true"
        await asyncio.sleep(0.01)


async def test_request_reply_with_headers(server: NatsServer) -> None:
    async with connected(server, "a") as asker, connected(server, "b") as answerer:

        async def answer(message: Message) -> None:
            await message.reply(message.data + message.headers["traceparent"].encode())

        await answerer.subscribe("baton.gw.g.accept", answer)
        got = await asker.request("baton.gw.g.accept", b"x", 1.0, {"traceparent": "-tp"})
        assert got == b"x-tp"


async def test_a_subscription_is_in_force_when_subscribe_returns(server: NatsServer) -> None:
    async with connected(server, "a") as asker, connected(server, "b") as answerer:

        async def answer(message: Message) -> None:
            await message.reply(b"y")

        for i in range(300):
            await answerer.subscribe(f"baton.gw.g{i}.accept", answer)
            assert await asker.request(f"baton.gw.g{i}.accept", b"x", 1.0) == b"y"


async def test_handlers_run_side_by_side(server: NatsServer) -> None:
    async with connected(server, "a") as bus:
        arrived, release = [], asyncio.Event()

        async def handler(message: Message) -> None:
            arrived.append(message.data)
            await release.wait()

        await bus.subscribe("baton.worker.*", handler)
        for i in range(5):
            await bus.publish("baton.worker.w", b"%d" % i)
        await until(lambda: len(arrived) == 5)
        assert arrived == [b"0", b"1", b"2", b"3", b"4"]
        release.set()


async def test_a_failing_handler_is_logged_and_the_next_message_served(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(server, "a") as bus:

        async def handler(message: Message) -> None:
            if message.data == b"bad":
                raise ValueError("boom")
            await message.reply(b"fine")

        await bus.subscribe("baton.x", handler)
        await bus.publish("baton.x", b"bad")
        assert await bus.request("baton.x", b"good", 1.0) == b"fine"
        assert "boom" in caplog.text


async def test_no_responders_and_silence(server: NatsServer) -> None:
    async with connected(server, "a") as bus:
        with pytest.raises(NoResponders):
            await bus.request("baton.nobody", b"", 1.0)

        async def silent(message: Message) -> None: ...

        await bus.subscribe("baton.silent", silent)
        with pytest.raises(BusTimeout):
            await bus.request("baton.silent", b"", 0.2)


@pytest.mark.fault("F21")
async def test_jobs_are_delivered_once_and_again_without_an_ack(server: NatsServer) -> None:
    async with connected(server, "g") as gateway, connected(server, "w") as worker:
        assert await worker.fetch_job(0.2) is None  # no queue yet: no error, and not at once
        await gateway.ensure_job_queue(600)
        await gateway.ensure_job_queue(600)
        await gateway.publish_job(b"one", "r:1", {"traceparent": "tp"})
        job = await worker.fetch_job(2)
        assert job is not None and job.data == b"one" and job.num_delivered == 1
        assert job.headers["traceparent"] == "tp"
        again = await worker.fetch_job(4)  # ack_wait is over
        assert again is not None and again.data == b"one" and again.num_delivered == 2
        await again.ack()
        assert await worker.fetch_job(0.3) is None


async def test_nak_gives_a_job_to_another_worker_at_once(server: NatsServer) -> None:
    async with connected(server, "a") as one, connected(server, "b") as other:
        await one.ensure_job_queue(600)
        await one.publish_job(b"j", "r:1")
        job = await one.fetch_job(2)
        assert job is not None
        await job.nak()
        job = await other.fetch_job(1)
        assert job is not None and job.num_delivered == 2


async def test_a_cancelled_fetch_loses_no_job(server: NatsServer) -> None:
    async with connected(server, "a") as bus, connected(server, "b") as other:
        await bus.ensure_job_queue(600)
        fetching = asyncio.create_task(bus.fetch_job(1))
        await asyncio.sleep(0.2)
        fetching.cancel()
        await bus.publish_job(b"j", "r:1")
        job = await bus.fetch_job(0.5)
        assert job is not None and job.num_delivered == 1
        await job.ack()
        # The same, and then the worker goes: what reached it is given back, not left to ack_wait.
        leaving = await NatsBus.connect(server.url, server.credentials_file("worker"), "c")
        fetching = asyncio.create_task(leaving.fetch_job(1))
        await asyncio.sleep(0.2)
        fetching.cancel()
        await bus.publish_job(b"k", "r:2")
        await asyncio.sleep(0.1)
        await leaving.close()
        job = await other.fetch_job(0.5)
        assert job is not None and job.data == b"k"


@pytest.mark.fault("F13")
async def test_a_full_queue_refuses(server: NatsServer) -> None:
    async with connected(server, "g") as bus:
        await bus.ensure_job_queue(600)
        await asyncio.gather(*(bus.publish_job(b"j", f"r{i}:1") for i in range(MAX_QUEUED_JOBS)))
        with pytest.raises(QueueFull):
            await bus.publish_job(b"j", "one-more:1")
        job = await bus.fetch_job(1)
        assert job is not None
        await job.ack()
        await asyncio.sleep(0.1)
        await bus.publish_job(b"j", "one-more:2")


async def test_two_gateways_with_different_request_timeouts(server: NatsServer) -> None:
    async with connected(server, "g1") as one, connected(server, "g2") as other:
        await one.ensure_job_queue(600)
        await other.ensure_job_queue(60)
        await other.publish_job(b"j", "r:1")
        assert await one.fetch_job(1) is not None


async def test_too_large(server: NatsServer) -> None:
    async with connected(server, "g") as bus:
        await bus.ensure_job_queue(600)
        await bus.publish_job(bytes(MAX_MESSAGE_BYTES - 1000), "r:1")
        for excess in (1, 0, -20):  # the last would fit without its header
            with pytest.raises(MessageTooLarge):
                await bus.publish_job(bytes(MAX_MESSAGE_BYTES + excess), "r:2")
        with pytest.raises(MessageTooLarge):
            await bus.publish("baton.x", bytes(MAX_MESSAGE_BYTES + 1))
        await bus.publish("baton.x", bytes(MAX_MESSAGE_BYTES - 16))
        await bus.publish_job(b"still here", "r:3")


@pytest.mark.fault("F9")
async def test_kill_and_restart(server: NatsServer) -> None:
    """Subscriptions go on, the queue is made again, jobs flow again; all by itself."""
    async with connected(server, "g", "gateway") as gateway, connected(server, "w") as worker:
        reports: list[bytes] = []

        async def on_report(message: Message) -> None:
            reports.append(message.data)

        await gateway.subscribe("baton.worker.*", on_report)
        await gateway.ensure_job_queue(600)
        gateway.on_reconnect(lambda: gateway.ensure_job_queue(600))
        got: list[bytes] = []

        async def work() -> None:
            while True:
                if job := await worker.fetch_job(1):
                    got.append(job.data)
                    await job.ack()

        working = asyncio.create_task(work())
        await gateway.publish_job(b"before", "r:1")
        await until(lambda: got == [b"before"])

        server.kill()
        await until(lambda: not gateway.connected and not worker.connected)
        assert gateway.connected_for_s == 0
        for call in (
            gateway.publish_job(b"down", "r:2"),
            gateway.publish("baton.x", b""),
            gateway.request("baton.x", b"", 1.0),
        ):
            with pytest.raises(BusTimeout):
                await call
        server.start()
        await until(lambda: gateway.connected and worker.connected)
        assert 0 <= gateway.connected_for_s < 5
        await worker.publish("baton.worker.w", b"alive")
        await until(lambda: reports == [b"alive"])
        await gateway.publish_job(b"after", "r:3")
        await until(lambda: got == [b"before", b"after"])
        working.cancel()


@pytest.mark.fault("F10")
async def test_publish_makes_the_lost_queue_again(server: NatsServer) -> None:
    async with connected(server, "g") as bus:
        await bus.ensure_job_queue(600)
        server.kill()
        await until(lambda: not bus.connected)
        server.start()
        await until(lambda: bus.connected)
        await bus.publish_job(b"j", "r:1")
        job = await bus.fetch_job(2)
        assert job is not None and job.data == b"j"


@pytest.mark.fault("F11")
async def test_a_frozen_server_is_a_timeout_within_two_seconds(server: NatsServer) -> None:
    loop = asyncio.get_running_loop()
    bus = await NatsBus.connect(server.url, server.credentials_file("gateway"), "g")
    await bus.ensure_job_queue(600)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        begin = loop.time()
        with pytest.raises(BusTimeout):
            await bus.publish_job(b"j", "r:1")
        assert 1.5 < loop.time() - begin < 2.5
        await until(lambda: not bus.connected, 5)
        begin = loop.time()
        with pytest.raises(BusTimeout):
            await bus.publish_job(b"j", "r:2")
        assert loop.time() - begin < 0.1
        assert await bus.fetch_job(0.2) is None
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await until(lambda: bus.connected)
    await bus.publish_job(b"j", "r:3")
    await bus.close()


@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_close_never_hangs(server: NatsServer, how: str) -> None:
    loop = asyncio.get_running_loop()
    bus = await NatsBus.connect(server.url, server.credentials_file("worker"), "w")

    async def handler(message: Message) -> None:
        await asyncio.sleep(60)

    await bus.subscribe("baton.x", handler)
    await bus.publish("baton.x", b"")
    fetching = asyncio.create_task(bus.fetch_job(30))
    await asyncio.sleep(0.1)
    if how == "killed":
        server.kill()
        await until(lambda: not bus.connected)
    else:
        os.kill(server.pid, signal.SIGSTOP)
    begin = loop.time()
    await bus.close()
    assert loop.time() - begin < 3.5
    assert await fetching is None
    await asyncio.sleep(0.05)  # cancelled tasks of the client end in the next turn of the loop
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, left


async def test_no_socket_outlives_the_bus(server: NatsServer) -> None:
    """Even where the peer takes nothing of what is still to be sent."""
    port = int(server.url.rsplit(":")[-1])
    bus = await NatsBus.connect(server.url, server.credentials_file("worker"), "w")
    os.kill(server.pid, signal.SIGSTOP)
    for _ in range(2):  # together more than the kernel buffers; neither makes the client wait
        await bus.publish("baton.x", bytes(MAX_MESSAGE_BYTES - 4096))
        await asyncio.sleep(0.1)
    await bus.close()
    left = [c for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == port]
    assert not left, left


async def test_a_short_freeze_changes_nothing(server: NatsServer) -> None:
    async with connected(server, "g") as bus:
        os.kill(server.pid, signal.SIGSTOP)
        await asyncio.sleep(1.5)
        os.kill(server.pid, signal.SIGCONT)
        await asyncio.sleep(0.2)
        assert bus.connected and bus.connected_for_s > 1.5


async def test_bad_credentials_files(server: NatsServer, tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    path.write_text('{"user": "gateway"}')
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="user and password"):
        await NatsBus.connect(server.url, path, "g")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="readable by others"):
        await NatsBus.connect(server.url, path, "g")


async def test_the_server_takes_no_stranger(server: NatsServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":")[-1]))
    assert (await reader.readline()).startswith(b"INFO")
    writer.write(b"CONNECT {}\r\nPING\r\n")
    assert b"Authorization Violation" in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_a_link_that_was_refused_comes_back(server: NatsServer, tmp_path: Path) -> None:
    """A server that does not know us makes nats-py close for good; the bus goes on trying."""
    async with connected(server, "a") as bus:
        got: list[bytes] = []

        async def handler(message: Message) -> None:
            got.append(message.data)

        reconnects: list[None] = []

        async def on_reconnect() -> None:
            reconnects.append(None)

        await bus.subscribe("baton.x", handler)
        bus.on_reconnect(on_reconnect)
        server.kill()
        with NatsServer(tmp_path / "other", port=int(server.url.rsplit(":")[-1])):
            await until(lambda: bus.statistics().get("Error", 0) > 0)
            await asyncio.sleep(0.5)
        server.start()
        await until(lambda: bus.connected)
        await bus.publish("baton.x", b"again")
        await until(lambda: got == [b"again"])
        assert reconnects


async def test_a_wrong_password_is_told_with_its_setting(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be set right at the server, so the process waits; its log says for what."""
    credentials = server.credentials_file("worker")
    credentials.write_text('{"user": "worker", "password": "wrong"}')
    connecting = asyncio.create_task(NatsBus.connect(server.url, credentials, "a"))
    await until(lambda: "nats_credentials_file: the server does not take" in caplog.text)
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)


async def test_no_server_is_told_with_its_setting(caplog: pytest.LogCaptureFixture) -> None:
    connecting = asyncio.create_task(NatsBus.connect("nats://127.0.0.1:1", None, "a"))
    await until(lambda: "nats_url: " in caplog.text)
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
