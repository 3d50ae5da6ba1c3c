"""Which networks the data port may use, by what, and what `auto` makes of it."""

import asyncio
import gc
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.certificates import make_authority, make_tls_files

from common import failpoints
from common.errors import ConfigError, PeerLost
from common.tls import TlsFiles
from kv_transfer.base import Peer, TcpAddress, TransportSettings
from kv_transfer.memory import PoolMemory, allocate_pool
from kv_transfer.registry import choose, make_exporters, make_importers
from kv_transfer.tcp import exporter
from tests.kv_transfer import rig as rigs
from tests.kv_transfer.conformance import CHECKS, CORRUPTION_CHECKS, Check
from tests.kv_transfer.rig import LAYOUT, make_imports, moves, open_rig
from tests.kv_transfer.stranger import Stranger, address_of, claimed, frame_of, heard


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "example.org", "::"])
def test_off_loopback_needs_to_be_asked_for(host: str, tmp_path: Path) -> None:
    with allocate_pool("plain", LAYOUT, 8, tmp_path, "p-1", 1) as pool:
        with pytest.raises(ConfigError, match="--insecure-transfer"):
            make_exporters("tcp", pool, TransportSettings(host=host))
        importers = make_importers("tcp", pool, TransportSettings())
        peer = Peer("p-2", 1, LAYOUT, 8, (TcpAddress(host, 9),))
        with pytest.raises(PeerLost, match="not encrypted"):
            choose(importers, peer, same_host=True)
        importers["tcp"].close()


def test_auto_does_without_a_port_that_nobody_allowed(tmp_path: Path) -> None:
    settings = TransportSettings(pool_dir=tmp_path, host="0.0.0.0")
    with allocate_pool("shm", LAYOUT, 8, tmp_path, "p-1", 1) as pool:
        assert list(make_exporters("auto", pool, settings)) == ["shm"]
    with (
        allocate_pool("plain", LAYOUT, 8, tmp_path, "p-1", 1) as pool,
        pytest.raises(ConfigError, match="--insecure-transfer"),
    ):
        make_exporters("auto", pool, settings)


def test_the_network_may_be_declared_safe(tmp_path: Path) -> None:
    settings = TransportSettings(host="0.0.0.0", advertise_host="127.0.0.1", insecure=True)
    with allocate_pool("plain", LAYOUT, 8, tmp_path, "p-1", 1) as pool:
        (port,) = make_exporters("tcp", pool, settings).values()
        importers = make_importers("tcp", pool, settings)
        peer = Peer("p-1", 1, LAYOUT, 8, (port.address(),))
        assert choose(importers, peer, same_host=False).transport == "tcp"
        importers["tcp"].close()
        port.close()
        port.close()


async def test_auto_falls_back_to_tcp_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    async with open_rig("auto", tmp_path) as rig:
        for folder, same, expected in (
            (tmp_path, True, "shm: reached"),
            (tmp_path, False, "shm: another host; tcp: reached"),
            (
                tmp_path / "elsewhere",
                True,
                "shm: the pool of p-1 is not in this worker's folder; tcp: reached",
            ),
        ):
            importers = make_importers(
                "auto", rig.importer_pool, TransportSettings(pool_dir=folder)
            )
            choice = await asyncio.to_thread(choose, importers, rig.exports.describe(), same)
            assert choice.reason == expected
            for importer in importers.values():
                importer.close()
        result = await rig.imports.fetch(await rig.offer([1]), moves({0: 2}))
        assert result.transport == "shm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def tls(folder: Path) -> TlsFiles:
    return make_tls_files(folder, "ours", make_authority(folder))


@pytest.fixture(scope="module")
def strangers_tls(folder: Path) -> TlsFiles:
    return make_tls_files(folder, "strangers", make_authority(folder, "other"))


def over_tls(tls: TlsFiles | None) -> TransportSettings:
    """A port on all addresses, dialled on loopback: what a test can have of a network."""
    return TransportSettings(host="0.0.0.0", advertise_host="127.0.0.1", tls=tls)


@pytest.fixture
def tls_rigs(tls: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every rig's tcp is under TLS."""
    monkeypatch.setattr(rigs, "TransportSettings", partial(replace, over_tls(tls)))
    yield
    failpoints.arm("")


@pytest.mark.usefixtures("tls_rigs")
@pytest.mark.parametrize("check", [*CHECKS, *CORRUPTION_CHECKS], ids=lambda check: check.__name__)
async def test_conformance_over_tls(check: Check, tmp_path: Path) -> None:
    await check("tcp", tmp_path)


@pytest.mark.usefixtures("tls_rigs")
async def test_strangers_to_tls(
    tls: TlsFiles, strangers_tls: TlsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the proof helps who has no certificate of the run, or speaks no TLS."""
    monkeypatch.setattr(exporter, "HANDSHAKE_S", 0.3)
    async with open_rig("tcp", tmp_path) as rig:
        assert address_of(rig).tls
        frame = frame_of(await claimed(rig))
        for num_strangers, said in enumerate((frame, b"", b"\x16\x03\x01"), start=1):
            assert not (await heard(rig, said)).startswith(b"\0"), said
            assert rig.exports.statistics().num_strangers == num_strangers
        stolen = replace(strangers_tls, ca=tls.ca)
        settings = over_tls(stolen)
        imports = make_imports("tcp", rig.importer_pool, settings, rig.transfers, rig.endpoints)
        with pytest.raises(PeerLost):
            await imports.fetch(await rig.offer([1]), moves({0: 2}))
        await imports.close()
        rig.require_untouched()
        assert rig.exports.statistics().num_strangers > 3
        await rig.imports.fetch(await rig.offer([1]), moves({0: 2}))


@pytest.mark.usefixtures("tls_rigs")
async def test_a_certificate_does_not_replace_the_proof(tls: TlsFiles, tmp_path: Path) -> None:
    async with open_rig("tcp", tmp_path) as rig:
        key, address = await claimed(rig), address_of(rig)

        def ask(said: bytes) -> bytes:
            with (
                socket.create_connection((address.host, address.port), 1.0) as plain,
                tls.client_context().wrap_socket(plain, server_hostname="localhost") as connection,
            ):
                connection.sendall(said)
                return connection.recv(100)

        assert await asyncio.to_thread(ask, frame_of(key, secret=bytes(16))) == b""
        assert rig.exports.statistics().num_strangers == 1
        assert await asyncio.to_thread(ask, frame_of(key)) != b""


@pytest.mark.usefixtures("tls_rigs")
async def test_closing_in_mid_handshake(tmp_path: Path) -> None:
    for said in (b"", b"\x16\x03\x01"):
        async with open_rig("tcp", tmp_path) as rig:
            stranger = Stranger(address_of(rig))
            stranger.say(said)
            await asyncio.sleep(0.02)
        assert stranger.hear() == b""
        stranger.close()
        gc.collect()


def test_each_end_says_what_it_needs(
    tls: TlsFiles, strangers_tls: TlsFiles, folder: Path, tmp_path: Path
) -> None:
    elsewhere = make_tls_files(folder, "elsewhere", (tls.ca, folder / "ca.key"), "DNS:elsewhere")
    with allocate_pool("plain", LAYOUT, 8, tmp_path, "p-1", 1) as pool:
        for port, reader, reason in (
            (tls, tls, None),
            (tls, None, "wants TLS"),
            (tls, strangers_tls, "cannot be reached"),
            (elsewhere, tls, "cannot be reached"),
        ):
            with serving(pool, over_tls(port)) as peer:
                importers = make_importers("tcp", pool, over_tls(reader))
                with closing(importers["tcp"]):
                    if reason is None:
                        assert choose(importers, peer, same_host=False).transport == "tcp"
                    else:
                        with pytest.raises(PeerLost, match=reason):
                            choose(importers, peer, same_host=False)


def test_loopback_is_plain_and_so_is_what_was_asked_to_be(tls: TlsFiles, tmp_path: Path) -> None:
    with allocate_pool("plain", LAYOUT, 8, tmp_path, "p-1", 1) as pool:
        for settings in (TransportSettings(tls=tls), replace(over_tls(tls), insecure=True)):
            with serving(pool, settings) as peer:
                (address,) = peer.addresses
                assert isinstance(address, TcpAddress) and not address.tls


@contextmanager
def serving(pool: PoolMemory, settings: TransportSettings) -> Iterator[Peer]:
    (port,) = make_exporters("tcp", pool, settings).values()
    with closing(port):
        yield Peer("p-1", 1, LAYOUT, 8, (port.address(),))
