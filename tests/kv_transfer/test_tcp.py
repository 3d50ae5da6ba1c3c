"""The data port against strangers."""

import asyncio
import contextlib
import gc
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from common.types import BlockRef
from kv_transfer.base import LeaseProof
from kv_transfer.lease import LeaseKey, LeaseVerdict
from kv_transfer.tcp import exporter, frames
from kv_transfer.tcp.stream import accepted
from tests.kv_transfer.rig import LAYOUT, NUM_BLOCKS, moves, open_rig
from tests.kv_transfer.stranger import (
    CLAIMED,
    Stranger,
    address_of,
    claimed,
    frame_of,
    heard,
)


async def the_proof_opens_exactly_the_claim(folder: Path) -> None:
    async with open_rig("tcp", folder) as rig:
        said = frame_of(await claimed(rig)) + frames.ASK.pack(0, 2)
        size = frames.ANSWER.size + 2 * LAYOUT.block_bytes
        answer = await heard(rig, said, size)
        assert answer[: frames.ANSWER.size] == frames.ANSWER.pack(2, LAYOUT.block_bytes)
        assert answer[frames.ANSWER.size :] == rig.exporter_pool.rows[[5, 7]].tobytes()


async def strangers_hear_nothing(folder: Path) -> None:
    async with open_rig("tcp", folder) as rig:
        key, other = await claimed(rig), await claimed(rig)
        unclaimed = LeaseKey.of(await rig.offer([9]))
        said = [
            frame_of(key, secret=bytes(16)),
            frame_of(key, secret=key.secret[:-1] + bytes([key.secret[-1] ^ 1])),
            frame_of(key, lease_id=bytes.fromhex(other.lease_id)),
            frame_of(key, lease_id=bytes(16)),
            frame_of(key, lease_id=bytes(16), secret=bytes(16)),
            frame_of(key, version=2),
            frame_of(key, magic=b"HTTP"),
            frame_of(unclaimed),
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(64),
        ]
        for frame in said:
            assert await heard(rig, frame + frames.ASK.pack(0, 1)) == b""
        assert rig.exports.statistics().num_strangers == len(said)


async def asking_out_of_bounds_is_hung_up_on(folder: Path) -> None:
    async with open_rig("tcp", folder) as rig:
        key = await claimed(rig)
        for first, count in ((0, 3), (2, 1), (3, 0), (2**32 - 1, 1), (1, 2**32 - 1)):
            answer = await heard(rig, frame_of(key) + frames.ASK.pack(first, count))
            assert answer == frames.ANSWER.pack(2, LAYOUT.block_bytes), (first, count)


async def an_ended_lease_serves_no_more(folder: Path) -> None:
    async with open_rig("tcp", folder) as rig:
        key = await claimed(rig)

        def talk() -> bytes:
            stranger = Stranger(address_of(rig))
            with contextlib.closing(stranger):
                stranger.say(frame_of(key))
                stranger.hear(frames.ANSWER.size)
                loop.call_soon_threadsafe(rig.exports.release, key)
                time.sleep(0.2)
                stranger.say(frames.ASK.pack(0, 1))
                return stranger.hear()

        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(talk) == b""
        assert await heard(rig, frame_of(key) + frames.ASK.pack(0, 1)) == b""


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
    monkeypatch.setattr(exporter.hmac, "compare_digest", lambda ours, theirs: True)
    with pytest.raises(AssertionError):
        await strangers_hear_nothing(tmp_path)


async def test_twin_without_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lax:
        size = frames.ASK.size

        @staticmethod
        def unpack(data: bytes) -> tuple[int, int]:
            """What a missing check would do: wrap around to other blocks of the claim."""
            first, count = struct.unpack("!II", data)
            return first % len(CLAIMED) - 1, count % len(CLAIMED) + 1

    ask, check = frames.ASK, asking_out_of_bounds_is_hung_up_on
    monkeypatch.setattr(exporter, "ASK", Lax)
    monkeypatch.setattr(Lax, "pack", ask.pack, raising=False)
    with pytest.raises(AssertionError):
        await check(tmp_path)


async def test_twin_without_revoking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter.TcpExporter, "revoke", lambda self, lease_id: None)
    with pytest.raises(AssertionError):
        await an_ended_lease_serves_no_more(tmp_path)


async def test_slow_strangers_are_few_and_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say a byte and wait. While they do, who has a proof gets in."""
    monkeypatch.setattr(exporter, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(exporter, "MAX_HANDSHAKES", 4)
    async with open_rig("tcp", tmp_path) as rig:
        offer = await rig.offer([1])
        address = address_of(rig)

        def arrive() -> list[Stranger]:
            strangers = [Stranger(address, 2.0) for _ in range(12)]
            for stranger in strangers:
                stranger.say(b"B")
            return strangers

        def leave() -> list[bytes]:
            heard = [stranger.hear() for stranger in strangers]
            for stranger in strangers:
                stranger.close()
            return heard

        start = time.monotonic()
        strangers = await asyncio.to_thread(arrive)
        await rig.imports.fetch(offer, moves({0: 2}))
        assert time.monotonic() - start < 0.45, "they were not there any more"
        assert await asyncio.to_thread(leave) == [b""] * 12
        assert time.monotonic() - start < 1.5
        assert rig.exports.statistics().num_strangers == 12


async def test_a_connection_that_fails_ends_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of its claim one block is outside the pool, which nobody foresaw; another is under way."""
    async with open_rig("tcp", tmp_path) as rig:
        (port,) = rig.exports._exporters.values()
        key = await claimed(rig)
        port.send(LeaseProof(key.lease_id, key.secret), [BlockRef(NUM_BLOCKS, 7)])
        other, address = await claimed(rig), address_of(rig)

        def talk() -> bytes:
            with contextlib.closing(Stranger(address)) as stranger:
                stranger.say(frame_of(other))
                stranger.hear(frames.ANSWER.size)
                with contextlib.closing(Stranger(address)) as broken:
                    broken.say(frame_of(key) + frames.ASK.pack(0, 1))
                    assert broken.hear() == frames.ANSWER.pack(1, LAYOUT.block_bytes)
                stranger.say(frames.ASK.pack(0, 1))
                return stranger.hear(LAYOUT.block_bytes)

        assert await asyncio.to_thread(talk) == rig.exporter_pool.rows[5].tobytes()
        assert "a connection to the data port failed" in caplog.text
        await rig.imports.fetch(await rig.offer([1]), moves({0: 2}))
        assert rig.exports.release(key) is LeaseVerdict.OK


async def test_hanging_up_without_a_word_is_not_strange(tmp_path: Path) -> None:
    """An importer's probe does; a frame that is cut off is none of its doings."""
    async with open_rig("tcp", tmp_path) as rig:
        frame = frame_of(await claimed(rig))
        for said, num_strangers in ((b"", 0), (frame[:1], 1), (frame[:-1], 2)):
            assert await heard(rig, said, end=True) == b""
            assert rig.exports.statistics().num_strangers == num_strangers


@pytest.mark.parametrize("num_connections", [1, 20])
async def test_closing_closes_what_just_came(num_connections: int, tmp_path: Path) -> None:
    """Connections and the end come to the port's thread at the same time, in every order."""
    for first in ("connections", "end", "nobody"):
        (tmp_path / first).mkdir()
        async with open_rig("tcp", tmp_path / first) as rig:
            address, (port,) = address_of(rig), rig.exports._exporters.values()
            assert isinstance(port, exporter.TcpExporter)
            if first != "nobody":  # it looks up only when both have come
                port._loop.call_soon_threadsafe(time.sleep, 0.1)
            if first == "end":
                port._loop.call_soon_threadsafe(port._accepting.cancel)
            strangers = [Stranger(address) for _ in range(num_connections)]
        for stranger in strangers:
            assert stranger.hear() == b""
            stranger.close()
    gc.collect()  # a socket left open warns, and a warning is an error here


async def test_who_has_to_go_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that has to go before its turn has come."""
    monkeypatch.setattr(exporter, "MAX_HANDSHAKES", 1)
    async with open_rig("tcp", tmp_path) as rig:
        (port,) = rig.exports._exporters.values()
        assert isinstance(port, exporter.TcpExporter)
        ours, theirs = zip(*(socket.socketpair() for _ in range(3)), strict=True)

        async def serve() -> None:
            async with asyncio.TaskGroup() as group:
                for end in ours:
                    port._admit(accepted(port._loop, end, None), group)

        done = asyncio.run_coroutine_threadsafe(serve(), port._loop)
        for end in theirs[:2]:
            end.settimeout(1.0)
            assert await asyncio.to_thread(end.recv, 1) == b""
        theirs[2].close()
        await asyncio.wrap_future(done)
        for end in theirs:
            end.close()
        assert rig.exports.statistics().num_strangers >= 2
    gc.collect()
