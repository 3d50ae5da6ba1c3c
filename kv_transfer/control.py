"""KVTransferService on both sides: the exporter's leases as a gRPC servicer, and its client.

Messages stop here: inward there are only the dataclasses of common/types.py and kv_transfer. Every
answer of the servicer is one synchronous step on the lease table (kv_transfer/exports.py).
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from common import rpc, wire
from common.errors import BatonError, LayoutMismatch, PeerLost
from common.failpoints import DROP, hit_async
from common.tls import TlsFiles
from common.types import Epoch, KVLayout, WorkerId
from kv_transfer.base import (
    CudaIpcAddress,
    DistAddress,
    HostIdentity,
    LoopbackAddress,
    NixlAddress,
    Peer,
    ShmAddress,
    TcpAddress,
    TransportAddress,
)
from kv_transfer.exports import Exports
from kv_transfer.lease import LeaseKey, LeaseVerdict

# A peer that takes longer to answer is taken for dead (timers of docs/design.md).
CALL_TIMEOUT_S = 3.0

Answer = TypeVar("Answer")


class KVTransferServicer(wire.worker_grpc.KVTransferServiceServicer):
    """Serves one worker's exports. A bad message raises InvalidRequest, which the server's
    boundary turns into a status."""

    def __init__(self, exports: Exports, host: HostIdentity, protocol_version: int) -> None:
        self._exports = exports
        self._host = host
        self._protocol_version = protocol_version

    async def Hello(
        self, request: wire.worker.HelloRequest, context: rpc.Context
    ) -> wire.worker.HelloResponse:
        peer = self._exports.describe()
        return wire.worker.HelloResponse(
            protocol_version=self._protocol_version,
            worker_id=peer.worker_id,
            epoch=peer.epoch,
            layout=wire.layout_to_proto(peer.layout),
            addresses=[_address_to_proto(address) for address in peer.addresses],
            host=_host_to_proto(self._host),
            num_blocks=peer.num_blocks,
        )

    async def Claim(
        self, request: wire.worker.ClaimRequest, context: rpc.Context
    ) -> wire.worker.ClaimResponse:
        verdict = self._exports.claim(
            _key_from_proto(request.key),
            request.claimer_id,
            request.block_indices,
            request.transport,
        )
        if await hit_async("export.before_claim_reply") == DROP:
            await _time_out()
        return wire.worker.ClaimResponse(verdict=_TO_PROTO[verdict], lease_ms=self._lease_ms)

    async def Renew(
        self, request: wire.worker.RenewRequest, context: rpc.Context
    ) -> wire.worker.RenewResponse:
        verdicts = self._exports.renew([_key_from_proto(key) for key in request.keys])
        if await hit_async("export.before_renew_reply") == DROP:
            await _time_out()
        return wire.worker.RenewResponse(
            verdicts=[_TO_PROTO[verdict] for verdict in verdicts], lease_ms=self._lease_ms
        )

    async def Settle(
        self, request: wire.worker.SettleRequest, context: rpc.Context
    ) -> wire.worker.SettleResponse:
        verdict = self._exports.settle(_key_from_proto(request.key))
        if await hit_async("export.before_settle_reply") == DROP:
            await _time_out()
        return wire.worker.SettleResponse(verdict=_TO_PROTO[verdict])

    async def Release(
        self, request: wire.worker.ReleaseRequest, context: rpc.Context
    ) -> wire.worker.ReleaseResponse:
        verdict = self._exports.release(_key_from_proto(request.key))
        if await hit_async("export.before_release_reply") == DROP:
            await _time_out()
        return wire.worker.ReleaseResponse(verdict=_TO_PROTO[verdict])

    @property
    def _lease_ms(self) -> int:
        return round(self._exports.lease_s * 1000)


async def _time_out() -> None:
    """Until the caller's patience is over, for failpoints."""
    await asyncio.sleep(2 * CALL_TIMEOUT_S)


class GrpcKVControl:
    """The `KVControl` of real processes: one channel for each exporter spoken to."""

    def __init__(
        self,
        worker_id: WorkerId,
        epoch: Epoch,
        layout: KVLayout,
        host: HostIdentity,
        token: str,
        protocol_version: int,
        tls: TlsFiles | None = None,
    ) -> None:
        self._hello = wire.worker.HelloRequest(
            protocol_version=protocol_version,
            worker_id=worker_id,
            epoch=epoch,
            layout=wire.layout_to_proto(layout),
            host=_host_to_proto(host),
        )
        self._token = token
        self._tls = tls
        self._channels: dict[str, rpc.Channel] = {}

    async def hello(self, endpoint: str) -> tuple[Peer, HostIdentity]:
        """Raises LayoutMismatch for another protocol version, before anything else is read."""
        answer = await _answered(self._stub(endpoint).Hello(self._hello, timeout=CALL_TIMEOUT_S))
        ours, theirs = self._hello.protocol_version, answer.protocol_version
        if ours != theirs:
            raise LayoutMismatch("protocol_version", str(ours), str(theirs))
        peer = Peer(
            worker_id=answer.worker_id,
            epoch=answer.epoch,
            layout=wire.layout_from_proto(answer.layout),
            num_blocks=answer.num_blocks,
            addresses=_addresses_from_proto(answer.addresses),
        )
        host = HostIdentity(
            answer.host.boot_id, answer.host.hostname, tuple(answer.host.device_uuids)
        )
        return peer, host

    async def claim(
        self, endpoint: str, key: LeaseKey, block_indices: Sequence[int], transport: str
    ) -> LeaseVerdict:
        request = wire.worker.ClaimRequest(
            key=_key_to_proto(key),
            claimer_id=self._hello.worker_id,
            claimer_epoch=self._hello.epoch,
            block_indices=block_indices,
            transport=transport,
        )
        call = self._stub(endpoint).Claim(request, timeout=CALL_TIMEOUT_S)
        return _from_proto((await _answered(call)).verdict)

    async def renew(self, endpoint: str, keys: Sequence[LeaseKey]) -> tuple[LeaseVerdict, ...]:
        request = wire.worker.RenewRequest(keys=[_key_to_proto(key) for key in keys])
        call = self._stub(endpoint).Renew(request, timeout=CALL_TIMEOUT_S)
        verdicts = tuple(_from_proto(verdict) for verdict in (await _answered(call)).verdicts)
        if len(verdicts) != len(keys):
            raise PeerLost("an exporter answered a renewal by halves")
        return verdicts

    async def settle(self, endpoint: str, key: LeaseKey) -> LeaseVerdict:
        request = wire.worker.SettleRequest(key=_key_to_proto(key))
        call = self._stub(endpoint).Settle(request, timeout=CALL_TIMEOUT_S)
        return _from_proto((await _answered(call)).verdict)

    async def release(self, endpoint: str, key: LeaseKey) -> LeaseVerdict:
        """Also where nothing is, or was ever, fetched from: then over a channel of its own, since
        nobody would close one that stayed."""
        if endpoint in self._channels:
            return await _release(self._stub(endpoint), key)
        async with self._open(endpoint) as channel:
            return await _release(wire.worker_grpc.KVTransferServiceStub(channel), key)

    async def forget(self, endpoint: str) -> None:
        channel = self._channels.pop(endpoint, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        for endpoint in list(self._channels):
            await self.forget(endpoint)

    def _stub(self, endpoint: str) -> "wire.worker_grpc.KVTransferServiceAsyncStub":
        if endpoint not in self._channels:
            self._channels[endpoint] = self._open(endpoint)
        return wire.worker_grpc.KVTransferServiceStub(self._channels[endpoint])

    def _open(self, endpoint: str) -> rpc.Channel:
        return rpc.make_internal_channel(endpoint, self._token, self._tls)


async def _release(
    stub: "wire.worker_grpc.KVTransferServiceAsyncStub", key: LeaseKey
) -> LeaseVerdict:
    request = wire.worker.ReleaseRequest(key=_key_to_proto(key))
    return _from_proto((await _answered(stub.Release(request, timeout=CALL_TIMEOUT_S))).verdict)


async def _answered(call: Awaitable[Answer]) -> Answer:
    """Whatever kept the answer away, an importer's conclusion is the same."""
    task = asyncio.current_task()
    num_cancels = task.cancelling() if task is not None else 0
    try:
        with rpc.calling():
            return await call
    except BatonError as error:
        raise PeerLost(f"no answer from an exporter: {error.message}") from None
    except asyncio.CancelledError:
        if task is not None and task.cancelling() > num_cancels:
            raise
        # Not this task was cancelled but the call: its channel was closed (`forget`).
        raise PeerLost("the connection to an exporter was closed") from None


# ---------------------------------------------------------------- messages


_TO_PROTO = {
    LeaseVerdict.OK: wire.worker.LEASE_VERDICT_OK,
    LeaseVerdict.UNKNOWN: wire.worker.LEASE_VERDICT_UNKNOWN,
    LeaseVerdict.EXPIRED: wire.worker.LEASE_VERDICT_EXPIRED,
    LeaseVerdict.RELEASED: wire.worker.LEASE_VERDICT_RELEASED,
    LeaseVerdict.SETTLED: wire.worker.LEASE_VERDICT_SETTLED,
    LeaseVerdict.TAKEN: wire.worker.LEASE_VERDICT_TAKEN,
    LeaseVerdict.STALE_EPOCH: wire.worker.LEASE_VERDICT_STALE_EPOCH,
    LeaseVerdict.STALE_ATTEMPT: wire.worker.LEASE_VERDICT_STALE_ATTEMPT,
    LeaseVerdict.BAD_SECRET: wire.worker.LEASE_VERDICT_BAD_SECRET,
    LeaseVerdict.BAD_BLOCKS: wire.worker.LEASE_VERDICT_BAD_BLOCKS,
}
_FROM_PROTO = {value: verdict for verdict, value in _TO_PROTO.items()}


def _from_proto(value: wire.worker.LeaseVerdict) -> LeaseVerdict:
    """A verdict that this version does not know is certainly not OK."""
    return _FROM_PROTO.get(value, LeaseVerdict.UNKNOWN)


def _key_to_proto(key: LeaseKey) -> wire.worker.LeaseKey:
    return wire.worker.LeaseKey(
        lease_id=key.lease_id, secret=key.secret, epoch=key.epoch, attempt=key.attempt
    )


def _key_from_proto(message: wire.worker.LeaseKey) -> LeaseKey:
    return LeaseKey(message.lease_id, message.secret, message.epoch, message.attempt)


def _host_to_proto(host: HostIdentity) -> wire.worker.HostIdentity:
    return wire.worker.HostIdentity(
        boot_id=host.boot_id, hostname=host.hostname, device_uuids=host.device_uuids
    )


def _address_to_proto(address: TransportAddress) -> wire.worker.TransportAddress:
    assert not isinstance(address, LoopbackAddress), "loopback does not leave its process"
    if isinstance(address, ShmAddress):
        shm = wire.worker.ShmAddress(
            worker_id=address.worker_id, epoch=address.epoch, size_bytes=address.size_bytes
        )
        return wire.worker.TransportAddress(shm=shm)
    if isinstance(address, TcpAddress):
        tcp = wire.worker.TcpAddress(host=address.host, port=address.port, tls=address.tls)
        return wire.worker.TransportAddress(tcp=tcp)
    if isinstance(address, CudaIpcAddress):
        ipc = wire.worker.CudaIpcAddress(device_uuid=address.device_uuid, handle=address.handle)
        return wire.worker.TransportAddress(cuda_ipc=ipc)
    if isinstance(address, NixlAddress):
        nixl = wire.worker.NixlAddress(
            agent=address.agent,
            base_address=address.base_address,
            memory=address.memory,
            device_index=address.device_index,
        )
        return wire.worker.TransportAddress(nixl=nixl)
    dist = wire.worker.DistAddress(
        host=address.host, port=address.port, device_uuid=address.device_uuid
    )
    if address.transport == "gloo":
        return wire.worker.TransportAddress(gloo=dist)
    return wire.worker.TransportAddress(nccl=dist)


def _addresses_from_proto(
    messages: Sequence[wire.worker.TransportAddress],
) -> tuple[TransportAddress, ...]:
    """Kinds that this version does not know are left out."""
    known = (_address_from_proto(message) for message in messages)
    return tuple(address for address in known if address is not None)


def _address_from_proto(message: wire.worker.TransportAddress) -> TransportAddress | None:
    match message.WhichOneof("address"):
        case "shm":
            shm = message.shm
            return ShmAddress(shm.worker_id, shm.epoch, shm.size_bytes)
        case "tcp":
            return TcpAddress(message.tcp.host, message.tcp.port, message.tcp.tls)
        case "cuda_ipc":
            return CudaIpcAddress(message.cuda_ipc.device_uuid, message.cuda_ipc.handle)
        case "gloo":
            dist = message.gloo
            return DistAddress("gloo", dist.host, dist.port, dist.device_uuid)
        case "nccl":
            dist = message.nccl
            return DistAddress("nccl", dist.host, dist.port, dist.device_uuid)
        case "nixl":
            nixl = message.nixl
            return NixlAddress(nixl.agent, nixl.base_address, nixl.memory, nixl.device_index)
        case _:
            return None
