"""KVTransferService over a real gRPC server and channel."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from common import rpc, wire
from common.errors import InvalidRequest, LayoutMismatch, LeaseRefused, PeerLost, Unauthenticated
from common.listener import host_port
from kv_transfer.base import (
    CudaIpcAddress,
    DistAddress,
    NixlAddress,
    ShmAddress,
    TcpAddress,
)
from kv_transfer.control import GrpcKVControl, KVTransferServicer
from kv_transfer.imports import Imports
from kv_transfer.lease import LeaseKey, LeaseState, LeaseVerdict
from kv_transfer.registry import make_importers
from tests.kv_transfer.rig import HOST, LAYOUT, WAIT_S, Rig, moves, open_rig

TOKEN = "run-token"
PROTOCOL = 1


@dataclass
class Served:
    rig: Rig
    endpoint: str
    imports: Imports
    control: GrpcKVControl


@asynccontextmanager
async def served(folder: Path, lease_s: float = 5.0) -> AsyncIterator[Served]:
    async with open_rig("shm", folder, lease_s) as rig:
        server = rpc.make_internal_server(TOKEN)
        servicer = KVTransferServicer(rig.exports, HOST, PROTOCOL)
        wire.worker_grpc.add_KVTransferServiceServicer_to_server(servicer, server)
        endpoint = host_port("127.0.0.1", rpc.bind(server, "127.0.0.1", 0))
        rig.exports.endpoint = endpoint
        await server.start()
        control = GrpcKVControl("d-1", 12, LAYOUT, HOST, TOKEN, PROTOCOL)
        importers = make_importers("shm", rig.importer_pool, rig.settings)
        imports = Imports(rig.importer_pool, importers, rig.transfers, control, HOST)
        try:
            yield Served(rig, endpoint, imports, control)
        finally:
            await imports.close()
            await control.close()
            await server.stop(None)


async def test_a_hand_off_over_grpc(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        offer = await it.rig.offer([4, 5])
        assert offer.endpoint == it.endpoint
        result = await it.imports.fetch(offer, moves({1: 3}))
        assert (it.rig.importer_pool.rows[3] == it.rig.exporter_pool.rows[5]).all()
        assert (result.num_blocks, result.transport) == (1, "shm")
        assert it.imports.statistics().links["p-1"].reason == "shm: reached"
        assert [end.state for end in it.rig.ends] == [LeaseState.SETTLED]


async def test_every_address_crosses_the_wire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As typed fields: what an importer gets is what the exporter's worker said."""
    addresses = (
        ShmAddress("p-1", 11, 1 << 33),
        TcpAddress("10.0.0.1", 65535, tls=True),
        CudaIpcAddress("GPU-1", bytes(range(64))),
        DistAddress("gloo", "127.0.0.1", 1),
        DistAddress("nccl", "10.0.0.1", 2, "GPU-1"),
        NixlAddress(bytes(range(256)) * 2, (1 << 64) - 1, "VRAM", 7),
    )
    async with served(tmp_path) as it:
        told = replace(it.rig.exports.describe(), addresses=addresses)
        monkeypatch.setattr(it.rig.exports, "describe", lambda: told)
        peer, host = await it.control.hello(it.endpoint)
        assert peer == told
        assert host == HOST


async def test_every_verdict_crosses_the_wire(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        ask, endpoint = it.control, it.endpoint
        key = LeaseKey.of(await it.rig.offer([1, 2], attempt=2))
        wrong = {
            LeaseVerdict.UNKNOWN: replace(key, lease_id="x"),
            LeaseVerdict.BAD_SECRET: replace(key, secret=b"x"),
            LeaseVerdict.STALE_EPOCH: replace(key, epoch=1),
            LeaseVerdict.STALE_ATTEMPT: replace(key, attempt=1),
        }
        verdicts = await ask.renew(endpoint, [key, *wrong.values()])
        assert verdicts == (LeaseVerdict.OK, *wrong)
        assert await ask.claim(endpoint, key, [9], "shm") is LeaseVerdict.BAD_BLOCKS
        assert await ask.claim(endpoint, key, [1], "shm") is LeaseVerdict.OK
        assert await ask.claim(endpoint, key, [1], "shm") is LeaseVerdict.TAKEN
        assert await ask.settle(endpoint, key) is LeaseVerdict.OK
        assert await ask.settle(endpoint, key) is LeaseVerdict.SETTLED
        released = LeaseKey.of(await it.rig.offer([1]))
        assert await ask.release(endpoint, released) is LeaseVerdict.OK
        assert await ask.release(endpoint, released) is LeaseVerdict.RELEASED


async def test_a_lease_is_renewed_over_grpc(tmp_path: Path) -> None:
    async with served(tmp_path, lease_s=0.5) as it:
        offer = await it.rig.offer([1])
        key = LeaseKey.of(offer)
        for _ in range(5):
            await asyncio.sleep(0.2)
            assert await it.control.renew(it.endpoint, [key]) == (LeaseVerdict.OK,)
        await it.rig.require_no_lease()
        with pytest.raises(LeaseRefused):
            await it.imports.fetch(offer, moves({0: 3}))


async def test_strangers_get_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        channel = rpc.make_internal_channel(it.endpoint, "another token")
        stub = wire.worker_grpc.KVTransferServiceStub(channel)
        with pytest.raises(Unauthenticated), rpc.calling():
            await stub.Hello(wire.worker.HelloRequest())
        await channel.close()
        stranger = GrpcKVControl("d-9", 1, LAYOUT, HOST, "another token", PROTOCOL)
        with pytest.raises(PeerLost):
            await stranger.hello(it.endpoint)
        await stranger.close()


async def test_bad_messages_are_refused_without_internals(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        channel = rpc.make_internal_channel(it.endpoint, TOKEN)
        stub = wire.worker_grpc.KVTransferServiceStub(channel)
        key = LeaseKey.of(await it.rig.offer([1]))
        proto = wire.worker.LeaseKey(
            lease_id=key.lease_id, secret=key.secret, epoch=key.epoch, attempt=key.attempt
        )
        with pytest.raises(InvalidRequest) as caught, rpc.calling():
            await stub.Claim(
                wire.worker.ClaimRequest(key=proto, block_indices=[0], transport="pigeon")
            )
        assert caught.value.field == "transport"
        for secret in (b"", b"x" * 4096, bytes(16)):
            proto.secret = secret
            answer = await stub.Settle(wire.worker.SettleRequest(key=proto))
            assert answer.verdict == wire.worker.LEASE_VERDICT_BAD_SECRET
        assert (await stub.Renew(wire.worker.RenewRequest())).verdicts == [], "no keys, no verdicts"
        await channel.close()


async def test_another_protocol_version_is_named(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        newer = GrpcKVControl("d-1", 12, LAYOUT, HOST, TOKEN, PROTOCOL + 1)
        with pytest.raises(LayoutMismatch) as caught:
            await newer.hello(it.endpoint)
        assert caught.value.field == "protocol_version"
        await newer.close()


async def test_nobody_there_is_peer_lost(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        offer = replace(await it.rig.offer([1]), endpoint="127.0.0.1:1")
        with pytest.raises(PeerLost):
            await it.imports.fetch(offer, moves({0: 3}))
        await it.imports.release(offer)


async def test_a_connection_closed_under_a_call_is_a_lost_peer_and_no_cancel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch that fails closes the connection that another one may be asking over."""

    hello, muted = KVTransferServicer.Hello, asyncio.Event()

    async def mute_once(*args: Any) -> wire.worker.HelloResponse:
        if not muted.is_set():
            muted.set()
            await asyncio.sleep(WAIT_S)
        return await hello(*args)

    monkeypatch.setattr(KVTransferServicer, "Hello", mute_once)
    async with served(tmp_path) as it:
        offer = await it.rig.offer([4, 5])
        fetching = asyncio.create_task(it.imports.fetch(offer, moves({1: 3})))
        await muted.wait()
        await it.control.forget(it.endpoint)
        async with asyncio.timeout(WAIT_S / 2):
            with pytest.raises(PeerLost):
                await fetching
        second = await it.rig.offer([4, 5])
        assert (await it.imports.fetch(second, moves({1: 3}))).num_blocks == 1


async def test_a_way_that_could_not_be_opened_for_any_reason_is_tried_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as it:
        monkeypatch.setattr("kv_transfer.links.choose", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await it.imports.fetch(await it.rig.offer([4]), moves({0: 3}))
        monkeypatch.undo()
        assert (await it.imports.fetch(await it.rig.offer([4]), moves({0: 3}))).num_blocks == 1


async def test_nor_does_a_release_leave_a_channel_behind(tmp_path: Path) -> None:
    """Each restart of a prefill worker left one in each decode worker."""
    async with served(tmp_path) as it:
        offer = await it.rig.offer([1])
        gone = replace(offer, endpoint="127.0.0.1:1")
        with pytest.raises(PeerLost):
            await it.imports.fetch(gone, moves({0: 3}))
        await it.imports.release(gone)
        assert not it.control._channels
        # Nor one that is answered, of an offer that was never to be fetched.
        await it.imports.release(offer)
        assert [end.state for end in it.rig.ends] == [LeaseState.RELEASED]
        assert not it.control._channels
        await it.imports.fetch(await it.rig.offer([1]), moves({0: 3}))
        await it.imports.release(await it.rig.offer([1]))
        assert it.control._channels.keys() == {it.endpoint}, "the link's own stays"
