"""Mutual TLS on the internal links: who gets in, who is told what, and what is said at start."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.certificates import make_authority, make_tls_files

from common import rpc
from common.bus import Message
from common.config import DecodeSettings, load
from common.errors import ConfigError
from common.listener import host_port
from common.nats_bus import NatsBus
from common.nats_server import NatsServer
from common.tls import TlsFiles, warn_if_open

TOKEN = "the run's token"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def ours(folder: Path) -> TlsFiles:
    return make_tls_files(folder, "ours", make_authority(folder))


@pytest.fixture(scope="module")
def strangers(folder: Path, ours: TlsFiles) -> TlsFiles:
    """A certificate of another authority, who trusts ours."""
    other = make_tls_files(folder, "strangers", make_authority(folder, "other"))
    return TlsFiles(other.cert, other.key, ours.ca)


@asynccontextmanager
async def serving(tls: TlsFiles | None) -> AsyncIterator[str]:
    server = rpc.make_internal_server(TOKEN)
    health = rpc.Health(server, ["s"])
    port = rpc.bind(server, "127.0.0.1", 0, tls)
    await health.set_ready(True)
    await server.start()
    try:
        yield host_port("127.0.0.1", port)
    finally:
        await server.stop(0)


async def check(target: str, tls: TlsFiles | None) -> grpc.StatusCode:
    async with rpc.make_internal_channel(target, TOKEN, tls) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="s"), timeout=1
            )
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


async def test_both_ends_of_grpc_need_a_certificate(ours: TlsFiles, strangers: TlsFiles) -> None:
    async with serving(ours) as target:
        assert await check(target, ours) is grpc.StatusCode.OK
        for refused in (None, strangers):
            assert await check(target, refused) is not grpc.StatusCode.OK
    async with serving(strangers) as target:  # its certificate is not signed by ours
        assert await check(target, ours) is grpc.StatusCode.UNAVAILABLE
    async with serving(None) as target:  # the token does not go out in the clear
        assert await check(target, ours) is grpc.StatusCode.UNAVAILABLE


async def test_the_name_that_was_dialled_counts(folder: Path, ours: TlsFiles) -> None:
    authority = (ours.ca, ours.ca.with_suffix(".key"))
    elsewhere = make_tls_files(folder, "elsewhere", authority, "DNS:decode.example")
    async with serving(elsewhere) as target:
        assert await check(target, ours) is grpc.StatusCode.UNAVAILABLE
    with (
        pytest.raises(ConfigError, match="tls_cert_file: not for 127"),
        NatsServer(folder / "elsewhere", tls=elsewhere),
    ):
        pass


async def test_nats_over_tls(
    folder: Path, ours: TlsFiles, strangers: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[bytes] = []

    async def keep(message: Message) -> None:
        got.append(message.data)

    with NatsServer(folder / "nats", tls=ours) as server:
        gateway = await NatsBus.connect(server.url, server.credentials_file("gateway"), "g", ours)
        worker = await NatsBus.connect(server.url, server.credentials_file("decode"), "d", ours)
        await gateway.subscribe("baton.worker.*", keep)
        await worker.publish("baton.worker.d", b"here")
        await gateway.ensure_job_queue(60)
        assert got == [b"here"]
        await worker.close()
        await gateway.close()
        for tls in (None, strangers):
            assert not await connects(server, tls)
    assert "cannot connect to NATS" in caplog.text
    with NatsServer(folder / "plain") as server:
        assert not await connects(server, ours)


async def connects(server: NatsServer, tls: TlsFiles | None) -> bool:
    try:
        async with asyncio.timeout(1.5):
            bus = await NatsBus.connect(server.url, server.credentials_file("decode"), "x", tls)
    except TimeoutError:
        return False
    await bus.close()
    return True


def test_files_that_cannot_be_used(folder: Path, ours: TlsFiles, strangers: TlsFiles) -> None:
    for files, setting in (
        (TlsFiles(ours.cert, strangers.key, ours.ca), "tls_cert_file"),
        (TlsFiles(folder / "none", ours.key, ours.ca), "tls_cert_file"),
        (TlsFiles(ours.cert, ours.key, folder / "none"), "tls_ca_file"),
        (TlsFiles(ours.cert, folder / "none", ours.ca), "tls_key_file"),
    ):
        with pytest.raises(ConfigError, match=setting):
            files.read()
    open_key = folder / "open.key"
    open_key.write_bytes(ours.key.read_bytes())
    open_key.chmod(0o644)
    with pytest.raises(ConfigError, match="readable by others"):
        TlsFiles(ours.cert, open_key, ours.ca).server_context()


def test_the_settings_go_together(ours: TlsFiles) -> None:
    flags = {"tls_cert_file": ours.cert, "tls_key_file": ours.key}
    with pytest.raises(ConfigError, match="go together"):
        load(DecodeSettings, flags)
    assert load(DecodeSettings, {**flags, "tls_ca_file": ours.ca}).tls == ours
    assert load(DecodeSettings, {}).tls is None


def test_off_loopback_without_tls_is_said(ours: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for quiet in (("127.0.0.1", None), ("::1", None), ("localhost", None), ("10.0.0.1", ours)):
            warn_if_open(*quiet)
        assert not caplog.records
        warn_if_open("0.0.0.0", None)
    assert "without TLS" in caplog.text and "--tls-cert-file" in caplog.text
