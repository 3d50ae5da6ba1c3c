"""Broken connections, stalls, and a lease that ends in mid copy."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common import failpoints
from common.errors import LeaseRefused, PeerLost
from kv_transfer.base import TcpAddress
from kv_transfer.lease import LeaseKey, LeaseState
from kv_transfer.tcp import frames, importer
from tests.kv_transfer.rig import LAYOUT, NUM_BLOCKS, Rig, moves, open_rig
from tests.kv_transfer.stranger import address_of


class Proxy:
    """Between importer and data port: ``cut_after`` gives, connection by connection, how many
    bytes to let through before hanging up (None: all, "stall": none, and silence)."""

    def __init__(self, target: TcpAddress, cut_after: list[int | str | None]) -> None:
        self._target = target
        self._cut_after: Iterator[int | str | None] = iter(cut_after)
        self.num_connections = 0
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = TcpAddress("127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self.num_connections += 1
        up, down = await asyncio.open_connection(self._target.host, self._target.port)
        forwarding = asyncio.create_task(_copy(reader, down))
        try:
            await self._answer(up, writer, next(self._cut_after))
        finally:
            forwarding.cancel()
            await asyncio.gather(forwarding, return_exceptions=True)
            for end in (down, writer):
                end.transport.abort()
            await asyncio.sleep(0)  # that is done in the loop's next turn

    @staticmethod
    async def _answer(
        up: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | str | None
    ) -> None:
        if left == "stall":
            await asyncio.sleep(30)
        while left != 0 and (data := await up.read(left if isinstance(left, int) else 4096)):
            writer.write(data)
            await writer.drain()
            if isinstance(left, int):
                left -= len(data)
        writer.close()
        await writer.wait_closed()


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
    cuts: list[int | str | None] = [
        None,
        frames.ANSWER.size + block + 10,
        frames.ANSWER.size + block,
    ]
    async with (
        open_rig("tcp", tmp_path) as rig,
        Proxy(address_of(rig), [*cuts, None]) as proxy,
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
        Proxy(address_of(rig), [None, *[frames.ANSWER.size + 5] * 9]) as proxy,
    ):
        await _through(rig, proxy, monkeypatch)
        with pytest.raises(PeerLost):
            await rig.imports.fetch(await rig.offer([1]), moves({0: 2}))
        assert proxy.num_connections == 2 + importer.MAX_FRUITLESS_TRIES
        assert [end.state for end in rig.ends] == [LeaseState.RELEASED]


async def test_silence_is_a_lost_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "STALL_S", 0.3)
    async with (
        open_rig("tcp", tmp_path) as rig,
        Proxy(address_of(rig), [None, "stall"]) as proxy,
    ):
        await _through(rig, proxy, monkeypatch)
        async with asyncio.timeout(2):
            with pytest.raises(PeerLost):
                await rig.imports.fetch(await rig.offer([1]), moves({0: 2}))


async def test_a_silent_peer_holds_up_the_others_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four fetches from it, and one from another exporter behind them on the transfer thread."""
    monkeypatch.setattr(frames, "STALL_S", 1.5)
    (tmp_path / "good").mkdir()
    async with (
        open_rig("tcp", tmp_path) as rig,
        open_rig("tcp", tmp_path / "good", epoch=99) as good,
        Proxy(address_of(rig), [None, *["stall"] * 4]) as proxy,
    ):
        await _through(rig, proxy, monkeypatch)
        rig.endpoints["good:1"] = good.exports
        offers = [await rig.offer([block]) for block in range(4)]
        silent = [asyncio.create_task(rig.imports.fetch(o, moves({0: 2}))) for o in offers]
        async with asyncio.timeout(5):
            while proxy.num_connections < 2 or rig.exports.statistics().leases.claimed < 4:
                await asyncio.sleep(0.01)
        begin = asyncio.get_running_loop().time()
        offer = replace(await good.offer([7]), endpoint="good:1")
        await rig.imports.fetch(offer, moves({0: 8}))
        assert asyncio.get_running_loop().time() - begin < 2.5 * frames.STALL_S
        assert (rig.importer_pool.rows[8] == good.exporter_pool.rows[7]).all()
        errors = await asyncio.gather(*silent, return_exceptions=True)
        assert [type(error) for error in errors] == [PeerLost] * 4
        assert proxy.num_connections == 2
        # It speaks again, and is greeted and dialled again.
        proxy._cut_after = iter([None, None])
        await rig.imports.fetch(await rig.offer([5]), moves({0: 9}))
        assert (rig.importer_pool.rows[9] == rig.exporter_pool.rows[5]).all()
        assert proxy.num_connections == 4


async def test_who_speaks_again_is_fetched_from_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a fetch that found it silent has not yet left the link."""
    monkeypatch.setattr(frames, "STALL_S", 0.3)
    async with (
        open_rig("tcp", tmp_path) as rig,
        Proxy(address_of(rig), [None, "stall", None, None]) as proxy,
    ):
        await _through(rig, proxy, monkeypatch)
        lingering = await rig.imports._links.use(await rig.offer([0]))
        with pytest.raises(PeerLost):
            await rig.imports.fetch(await rig.offer([1]), moves({0: 2}))
        await rig.imports.fetch(await rig.offer([5]), moves({0: 9}))
        assert (rig.importer_pool.rows[9] == rig.exporter_pool.rows[5]).all()
        rig.imports._links.unuse(lingering)


async def test_a_lease_that_ended_in_the_queue_takes_no_other_with_it(tmp_path: Path) -> None:
    async with open_rig("tcp", tmp_path) as rig:
        offers = [await rig.offer([block]) for block in range(3)]
        failpoints.arm("decode.copy_block=sleep:0.3@1")
        fetching = [
            asyncio.create_task(rig.imports.fetch(offer, moves({0: block})))
            for block, offer in enumerate(offers)
        ]
        while rig.exports.statistics().leases.claimed < 3:
            await asyncio.sleep(0.01)
        rig.exports.release(LeaseKey.of(offers[1]))
        first, ended, last = await asyncio.gather(*fetching, return_exceptions=True)
        assert isinstance(ended, PeerLost | LeaseRefused)
        for result in (first, last):
            assert not isinstance(result, BaseException), result
    failpoints.arm("")


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
