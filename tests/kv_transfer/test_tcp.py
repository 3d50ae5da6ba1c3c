"""The data port against strangers, broken connections and stalls."""

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from common import failpoints
from common.errors import ConfigError, LeaseRefused, PeerLost
from kv_transfer import tcp
from kv_transfer.base import Peer, TcpAddress, TransportSettings
from kv_transfer.lease import LeaseKey, LeaseState, LeaseVerdict
from kv_transfer.memory import allocate_pool
from kv_transfer.registry import choose, make_exporters, make_importers
from tests.kv_transfer.rig import LAYOUT, NUM_BLOCKS, Rig, moves, open_rig

OFFERED = [4, 5, 6, 7]
CLAIMED = [1, 3]


class Stranger:
    """A raw connection to the data port; everything blocks for at most ``patience_s``."""

    def __init__(self, address: TcpAddress, patience_s: float = 1.0) -> None:
        self._socket = socket.create_connection((address.host, address.port), patience_s)

    def say(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def hear(self, size: int = 1 << 20) -> bytes:
        """What comes until the other end hangs up, ``size`` bytes, or patience is over."""
        heard = b""
        with contextlib.suppress(ConnectionResetError, TimeoutError):
            while len(heard) < size and (data := self._socket.recv(size - len(heard))):
                heard += data
        return heard

    def close(self) -> None:
        self._socket.close()


def _address(rig: Rig) -> TcpAddress:
    (address,) = rig.exports.describe().addresses
    assert isinstance(address, TcpAddress)
    return address


async def _claimed(rig: Rig) -> LeaseKey:
    key = LeaseKey.of(await rig.offer(OFFERED))
    assert rig.exports.claim(key, "d-1", CLAIMED, "tcp") is LeaseVerdict.OK
    return key


def _frame(key: LeaseKey, **changes: bytes | int) -> bytes:
    fields = {"magic": tcp.MAGIC, "version": tcp.VERSION, "secret": key.secret, **changes}
    lease_id = changes.get("lease_id", bytes.fromhex(key.lease_id))
    return tcp.FIRST_FRAME.pack(fields["magic"], fields["version"], lease_id, fields["secret"])


async def _heard(rig: Rig, said: bytes, size: int = 1 << 20, patience_s: float = 1.0) -> bytes:
    def talk() -> bytes:
        stranger = Stranger(_address(rig), patience_s)
        with contextlib.closing(stranger):
            stranger.say(said)
            return stranger.hear(size)

    return await asyncio.to_thread(talk)


async def the_proof_opens_exactly_the_claim(folder: Path) -> None:
    async with open_rig("tcp", folder) as rig:
        said = _frame(await _claimed(rig)) + tcp.ASK.pack(0, 2)
        size = tcp.ANSWER.size + 2 * LAYOUT.block_bytes
        heard = await _heard(rig, said, size)
        assert heard[: tcp.ANSWER.size] == tcp.ANSWER.pack(2, LAYOUT.block_bytes)
        assert heard[tcp.ANSWER.size :] == rig.exporter_pool.rows[[5, 7]].tobytes()


async def strangers_hear_nothing(folder: Path) -> None:
    async with open_rig("tcp", folder) as rig:
        key, other = await _claimed(rig), await _claimed(rig)
        unclaimed = LeaseKey.of(await rig.offer([9]))
        said = [
            _frame(key, secret=bytes(16)),
            _frame(key, secret=key.secret[:-1] + bytes([key.secret[-1] ^ 1])),
            _frame(key, lease_id=bytes.fromhex(other.lease_id)),
            _frame(key, lease_id=bytes(16)),
            _frame(key, lease_id=bytes(16), secret=bytes(16)),
            _frame(key, version=2),
            _frame(key, magic=b"HTTP"),
            _frame(unclaimed),
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(64),
        ]
        for frame in said:
            assert await _heard(rig, frame + tcp.ASK.pack(0, 1)) == b""
        assert rig.exports.statistics().num_strangers == len(said)


async def asking_out_of_bounds_is_hung_up_on(folder: Path) -> None:
    async with open_rig("tcp", folder) as rig:
        key = await _claimed(rig)
        for first, count in ((0, 3), (2, 1), (3, 0), (2**32 - 1, 1), (1, 2**32 - 1)):
            heard = await _heard(rig, _frame(key) + tcp.ASK.pack(first, count))
            assert heard == tcp.ANSWER.pack(2, LAYOUT.block_bytes), (first, count)


async def an_ended_lease_serves_no_more(folder: Path) -> None:
    async with open_rig("tcp", folder) as rig:
        key = await _claimed(rig)

        def talk() -> bytes:
            stranger = Stranger(_address(rig))
            with contextlib.closing(stranger):
                stranger.say(_frame(key))
                stranger.hear(tcp.ANSWER.size)
                loop.call_soon_threadsafe(rig.exports.release, key)
                time.sleep(0.2)
                stranger.say(tcp.ASK.pack(0, 1))
                return stranger.hear()

        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(talk) == b""
        assert await _heard(rig, _frame(key) + tcp.ASK.pack(0, 1)) == b""


@pytest.mark.parametrize(
    "check",
    [
        the_proof_opens_exactly_the_claim,
        strangers_hear_nothing,
        asking_out_of_bounds_is_hung_up_on,
        an_ended_lease_serves_no_more,
    ],
    ids=lambda check: check.__name__,
)
async def test_the_data_port(check: Callable[[Path], Awaitable[None]], tmp_path: Path) -> None:
    await check(tmp_path)


async def test_twin_without_comparing_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp.hmac, "compare_digest", lambda ours, theirs: True)
    with pytest.raises(AssertionError):
        await strangers_hear_nothing(tmp_path)


async def test_twin_without_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lax:
        size = tcp.ASK.size

        @staticmethod
        def unpack(data: bytes) -> tuple[int, int]:
            """What a missing check would do: wrap around to other blocks of the claim."""
            first, count = struct.unpack("!II", data)
            return first % len(CLAIMED) - 1, count % len(CLAIMED) + 1

    ask, answer = tcp.ASK, asking_out_of_bounds_is_hung_up_on
    monkeypatch.setattr(tcp, "ASK", Lax)
    monkeypatch.setattr(Lax, "pack", ask.pack, raising=False)
    with pytest.raises(AssertionError):
        await answer(tmp_path)


async def test_twin_without_revoking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp.TcpExporter, "revoke", lambda self, lease_id: None)
    with pytest.raises(AssertionError):
        await an_ended_lease_serves_no_more(tmp_path)


async def test_mutated_frames_open_nothing(tmp_path: Path) -> None:
    """One bit of the first frame changed, every one of them, and random bytes of any length."""
    async with open_rig("tcp", tmp_path) as rig:
        key = await _claimed(rig)
        whole, rng = _frame(key), random.Random(0)

        def talk() -> int:
            num_heard = 0
            for bit in range(len(whole) * 8):
                mutated = bytearray(whole)
                mutated[bit // 8] ^= 1 << bit % 8
                num_heard += _talk_once(rig, bytes(mutated) + tcp.ASK.pack(0, 2))
            for _ in range(100):
                num_heard += _talk_once(rig, rng.randbytes(rng.randrange(200)), end=True)
            return num_heard

        assert await asyncio.to_thread(talk) == 0
        offer = await rig.offer([1])
        await rig.imports.fetch(offer, moves({0: 2}))


def _talk_once(rig: Rig, said: bytes, end: bool = False) -> int:
    stranger = Stranger(_address(rig))
    with contextlib.closing(stranger):
        stranger.say(said)
        if end:
            with contextlib.suppress(OSError):
                stranger._socket.shutdown(socket.SHUT_WR)
        return len(stranger.hear())


async def test_slow_strangers_are_few_and_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(tcp, "MAX_HANDSHAKES", 4)
    async with open_rig("tcp", tmp_path) as rig:

        def besiege() -> list[bytes]:
            strangers = [Stranger(_address(rig), 2.0) for _ in range(12)]
            for stranger in strangers:
                stranger.say(b"B")
            heard = [stranger.hear() for stranger in strangers]
            for stranger in strangers:
                stranger.close()
            return heard

        start = time.monotonic()
        assert await asyncio.to_thread(besiege) == [b""] * 12
        assert time.monotonic() - start < 1.5
        assert rig.exports.statistics().num_strangers == 12
        await rig.imports.fetch(await rig.offer([1]), moves({0: 2}))


class Proxy:
    """Between importer and data port: ``cut_after`` gives, connection by connection, how many
    bytes to let through before hanging up (None: all, "stall": none, and silence)."""

    def __init__(self, target: TcpAddress, cut_after: list[int | str | None]) -> None:
        self._target = target
        self._cut_after: Iterator[int | str | None] = iter(cut_after)
        self.num_connections = 0

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = TcpAddress("127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        left = next(self._cut_after)
        up, down = await asyncio.open_connection(self._target.host, self._target.port)
        forward = asyncio.create_task(self._copy(reader, down))
        try:
            while left != "stall" and (data := await up.read(4096 if left is None else left)):
                writer.write(data)
                await writer.drain()
                if isinstance(left, int) and not (left := left - len(data)):
                    return
            if left == "stall":
                await asyncio.sleep(30)
        finally:
            forward.cancel()
            down.close()
            writer.close()

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
            await writer.drain()


async def _through(rig: Rig, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter advertises the proxy instead of itself."""
    (exporter,) = rig.exports._exporters.values()
    monkeypatch.setattr(exporter, "address", lambda: proxy.address)


async def test_a_broken_connection_is_resumed_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = LAYOUT.block_bytes
    # The first is connect's probe. Then: cut inside block 2, at its end, and never.
    cuts: list[int | str | None] = [None, tcp.ANSWER.size + block + 10, tcp.ANSWER.size + block]
    async with (
        open_rig("tcp", tmp_path) as rig,
        Proxy(_address(rig), [*cuts, None]) as proxy,
    ):
        await _through(rig, proxy, monkeypatch)
        await rig.imports.fetch(await rig.offer(range(6)), moves({i: i + 6 for i in range(6)}))
        assert (rig.importer_pool.rows[6:12] == rig.exporter_pool.rows[:6]).all()
        assert proxy.num_connections == 4


async def test_connections_that_bring_nothing_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        open_rig("tcp", tmp_path) as rig,
        Proxy(_address(rig), [None, *[tcp.ANSWER.size + 5] * 9]) as proxy,
    ):
        await _through(rig, proxy, monkeypatch)
        with pytest.raises(PeerLost):
            await rig.imports.fetch(await rig.offer([1]), moves({0: 2}))
        assert proxy.num_connections == 2 + tcp.MAX_FRUITLESS_TRIES
        assert [end.state for end in rig.ends] == [LeaseState.RELEASED]


async def test_silence_is_a_lost_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "STALL_S", 0.3)
    async with (
        open_rig("tcp", tmp_path) as rig,
        Proxy(_address(rig), [None, "stall"]) as proxy,
    ):
        await _through(rig, proxy, monkeypatch)
        async with asyncio.timeout(2):
            with pytest.raises(PeerLost):
                await rig.imports.fetch(await rig.offer([1]), moves({0: 2}))


async def test_a_lease_released_in_mid_copy_hangs_up(tmp_path: Path) -> None:
    """A settle could not succeed any more; the importer need not wait for its end to know."""
    async with open_rig("tcp", tmp_path) as rig:
        offer = await rig.offer(range(NUM_BLOCKS))
        everything = moves({i: i for i in range(NUM_BLOCKS)})
        failpoints.arm("decode.copy_block=sleep:0.05")
        fetching = asyncio.create_task(rig.imports.fetch(offer, everything))
        await asyncio.sleep(0.1)
        rig.exports.release(LeaseKey.of(offer))
        with pytest.raises((PeerLost, LeaseRefused)):
            await fetching
    failpoints.arm("")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "example.org", "::"])
def test_off_loopback_needs_to_be_asked_for(host: str, tmp_path: Path) -> None:
    with allocate_pool("plain", LAYOUT, 8, tmp_path, "p-1", 1) as pool:
        with pytest.raises(ConfigError, match="insecure_transfer"):
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
        pytest.raises(ConfigError, match="insecure_transfer"),
    ):
        make_exporters("auto", pool, settings)


def test_the_network_may_be_declared_safe(tmp_path: Path) -> None:
    settings = TransportSettings(host="0.0.0.0", advertise_host="127.0.0.1", insecure=True)
    with allocate_pool("plain", LAYOUT, 8, tmp_path, "p-1", 1) as pool:
        (exporter,) = make_exporters("tcp", pool, settings).values()
        importers = make_importers("tcp", pool, settings)
        peer = Peer("p-1", 1, LAYOUT, 8, (exporter.address(),))
        assert choose(importers, peer, same_host=False).transport == "tcp"
        importers["tcp"].close()
        exporter.close()
        exporter.close()


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
