"""The real gateway and the real workers in one process, under a made clock and a bad network."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from sim import memo
from sim.network import Faults, Host, Network, SimBus
from sim.runtime import InlineRuntime, SlowTransfers

from common.config import DecodeSettings, GatewaySettings, PrefillSettings, WorkerSettings
from common.errors import PeerLost
from common.telemetry import Telemetry
from common.types import Role
from common.wire import offer_from_proto
from common.wire import worker as wire
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.loop import OnEvents
from gateway.decode_link import Dial
from gateway.gateway import Gateway
from gateway.registry import WorkerEntry
from gateway.tokenizer import IdTokenizer
from kv_transfer.base import HostIdentity, Peer, TransportSettings
from kv_transfer.exports import Exports
from kv_transfer.imports import Imports
from kv_transfer.lease import LeaseKey, LeaseVerdict
from kv_transfer.memory import allocate_pool
from kv_transfer.registry import make_exporters, make_importers
from prefill_worker.worker import PrefillWorker
from worker.identity import Endpoints, WorkerIdentity
from worker.model import model_facts
from worker.report import WorkerFacts
from worker.runtime import make_engine

BLOCK = 4
VOCAB = 64
LEASE_S = 3.0
THIS_HOST = HostIdentity("boot", "here")
T = TypeVar("T")

memo.remember()


@cache
def _gateway_settings(
    gateway_id: str, routing: Literal["auto", "load", "random"], threshold: int | None
) -> GatewaySettings:
    return GatewaySettings(
        gateway_id=gateway_id,
        model="oracle",
        grpc_port=0,
        request_timeout_s=120.0,
        routing=routing,
        local_prefill_threshold=threshold,
    )


@cache
def _worker_settings(
    kind: type[PrefillSettings] | type[DecodeSettings],
    num_blocks: int,
    max_num_batched_tokens: int,
    async_depth: int,
) -> PrefillSettings | DecodeSettings:
    drafts: dict[str, Any] = {}
    if kind is DecodeSettings and async_depth == 0:
        drafts = {"speculation": "ngram", "fixed_k": True, "num_speculative_tokens": 3}
        drafts |= {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    return kind(
        **drafts,
        model="oracle",
        block_size=BLOCK,
        num_blocks=num_blocks,
        oracle_vocab_size=VOCAB,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=8,
        on_ledger_fault="raise",
        lease_s=LEASE_S,
        async_depth=async_depth,
    )


@dataclass
class Node:
    """One worker's process."""

    host: Host
    worker: PrefillWorker | DecodeWorker
    engine: Engine
    exports: Exports | None = None


@dataclass(frozen=True)
class Choices:
    """What gateways and workers draw their settings from. Decode workers of one run say the same of
    themselves, and compute any prompt that they are sent."""

    routing: Sequence[Literal["auto", "load", "random"]] = ("auto", "auto", "load", "random")
    thresholds: Sequence[int | None] = (None, 0, BLOCK, 3 * BLOCK)
    local_prefill: Sequence[str] = ("never", "never", "auto", "always")
    chunk_tokens: Sequence[int] = (5, 16, 64)


_DEFAULT_CHOICES = Choices()


@dataclass
class SimCluster:
    rng: random.Random
    network: Network
    transport: TransportSettings
    num_blocks: int
    # Says what is wrong on a worker, "" if nothing; asked between its engine's steps.
    check: "Callable[[Node], str]"
    checksum: str
    choices: Choices
    local_prefill: str
    wrong: list[str] = field(default_factory=list)
    num_breaks: int = 0
    gateways: list[tuple[Host, Gateway]] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    num_started: int = 0

    # ------------------------------------------------------------ processes

    async def start_gateway(self) -> Gateway:
        host = Host(f"gw{len(self.gateways)}")
        settings = _gateway_settings(
            host.name,
            self.rng.choice(self.choices.routing),
            self.rng.choice(self.choices.thresholds),
        )
        clock = asyncio.get_running_loop().time
        gateway = Gateway(
            settings,
            SimBus(self.network, host),
            partial(self._dialer, host),
            _OfferClient(self, host),
            IdTokenizer(),
            Telemetry("sim", host.name, None, clock),
            clock,
        )
        self._watch_grants(gateway)
        await gateway.start()
        self.gateways.append((host, gateway))
        return gateway

    def _watch_grants(self, gateway: Gateway) -> None:
        """An attempt has one owner, ever."""
        owners: dict[tuple[str, int], tuple[str, int]] = {}
        accept = gateway.prefill.accept

        def watched(request: wire.AcceptRequest) -> wire.AcceptReply:
            reply = accept(request)
            if reply.granted:
                key, owner = (
                    (request.request_id, request.attempt),
                    (request.worker_id, request.epoch),
                )
                if owners.setdefault(key, owner) != owner:
                    self.wrong.append(f"{key} is owned by {owners[key]} and {owner}")
            return reply

        gateway.prefill.accept = watched  # type: ignore[method-assign]

    async def start_worker(self, role: Role) -> Node:
        self.num_started += 1
        host = Host(f"{role.value}-{self.num_started}")
        settings = _worker_settings(
            PrefillSettings if role is Role.PREFILL else DecodeSettings,
            self.num_blocks,
            self.rng.choice(self.choices.chunk_tokens),
            self.rng.choice((0, 1)),
        )
        node = self._assemble(host, role, settings)
        await node.worker.start()
        self.nodes[host.name] = node
        host.spawn(node.worker.run())
        return node

    def _assemble(self, host: Host, role: Role, settings: WorkerSettings) -> Node:
        clock = asyncio.get_running_loop().time
        model = model_facts(settings)
        # Without checksums the exporter's verdict alone stands between a copy and its use.
        model = replace(model, layout=replace(model.layout, checksum=self.checksum))
        identity = WorkerIdentity(host.name, role, self.num_started)
        memory = allocate_pool(
            "plain",
            model.layout,
            self.num_blocks + 1,
            self.transport.pool_dir,
            identity.worker_id,
            identity.epoch,
        )
        engine = make_engine(settings, model, memory, clock, lambda seconds: None)
        transfers = SlowTransfers(self.rng, slow=self.network.faults.delay)
        telemetry = Telemetry("sim", host.name, None, clock)
        facts = WorkerFacts(
            identity=identity,
            endpoints=Endpoints(host.name, "admin"),
            model=model.description,
            layout=model.layout,
            num_blocks=self.num_blocks,
            step_tokens=engine.step_tokens,
            transports=("loopback",),
            local_prefill=self.local_prefill if role is Role.DECODE else "",
        )
        bus = SimBus(self.network, host)

        def look() -> None:
            node = self.nodes.get(host.name)
            if node is not None and (wrong := self.check(node)):
                self.wrong.append(wrong)

        def make_runtime(on_events: OnEvents) -> InlineRuntime:
            return InlineRuntime(engine, on_events, host, self.rng, look)

        if isinstance(settings, PrefillSettings):
            exporters = make_exporters("loopback", memory, self.transport)
            exports = Exports(memory, exporters, transfers, host.name, LEASE_S)
            prefill = PrefillWorker(facts, settings, bus, exports, make_runtime, telemetry)
            return Node(host, prefill, engine, exports)
        importers = make_importers("loopback", memory, self.transport)
        control = _Control(self, host)
        imports = Imports(memory, importers, transfers, control, THIS_HOST)
        assert isinstance(settings, DecodeSettings)
        decode = DecodeWorker(facts, settings, bus, imports, make_runtime, telemetry)
        return Node(host, decode, engine)

    async def kill(self, name: str) -> None:
        """kill -9 of a worker; what it held is gone with it."""
        node = self.nodes.pop(name)
        await self.network.kill(node.host)
        await node.worker.stop()

    async def close(self) -> None:
        for _, gateway in self.gateways:
            await gateway.close()
        for name in list(self.nodes):
            await self.kill(name)

    # ------------------------------------------------------------ what travels

    def _dialer(self, client: Host, entry: WorkerEntry) -> Dial:
        async def dial(
            requests: AsyncIterator[wire.StreamRequest],
        ) -> AsyncIterator[wire.StreamResponse]:
            node = self.nodes.get(entry.worker_id)
            server = node.host if node is not None else Host("gone", alive=False)
            worker: Any = node.worker if node is not None else None
            stream = self.network.stream(client, server, lambda source: worker.stream(source))
            async for message in stream(requests):
                yield message

        return dial

    async def ask_exports(self, endpoint: str, work: Callable[[Exports], T]) -> T:
        node = self.nodes.get(endpoint)
        if node is None or node.exports is None:
            raise PeerLost("connection refused")
        exports = node.exports
        return await self.network.call(node.host, lambda: work(exports))


class _OfferClient:
    def __init__(self, cluster: SimCluster, host: Host) -> None:
        self._cluster = cluster
        self._host = host

    async def renew(self, offer: wire.Offer) -> bool:
        key = LeaseKey.of(offer_from_proto(offer))
        ask = self._cluster.ask_exports
        return (await ask(offer.endpoint, lambda exports: exports.renew([key]))) == (
            LeaseVerdict.OK,
        )

    async def release(self, offer: wire.Offer) -> None:
        key = LeaseKey.of(offer_from_proto(offer))
        await self._cluster.ask_exports(offer.endpoint, lambda exports: exports.release(key))

    def keep(self, endpoints: Set[str]) -> None:
        """There are no channels here."""


class _Control:
    """KVControl over the bad network."""

    def __init__(self, cluster: SimCluster, host: Host) -> None:
        self._cluster = cluster
        self._host = host

    async def _ask(self, endpoint: str, work: Callable[[Exports], T]) -> T:
        if not self._host.alive:
            raise PeerLost("this host is dead")
        return await self._cluster.ask_exports(endpoint, work)

    async def hello(self, endpoint: str) -> tuple[Peer, HostIdentity]:
        return await self._ask(endpoint, lambda exports: (exports.describe(), THIS_HOST))

    async def claim(
        self, endpoint: str, key: LeaseKey, block_indices: Sequence[int], transport: str
    ) -> LeaseVerdict:
        name = self._host.name
        return await self._ask(endpoint, lambda e: e.claim(key, name, block_indices, transport))

    async def renew(self, endpoint: str, keys: Sequence[LeaseKey]) -> tuple[LeaseVerdict, ...]:
        return await self._ask(endpoint, lambda exports: exports.renew(keys))

    async def settle(self, endpoint: str, key: LeaseKey) -> LeaseVerdict:
        return await self._ask(endpoint, lambda exports: exports.settle(key))

    async def release(self, endpoint: str, key: LeaseKey) -> LeaseVerdict:
        return await self._ask(endpoint, lambda exports: exports.release(key))

    async def forget(self, endpoint: str) -> None: ...


def make_cluster(
    rng: random.Random,
    faults: Faults,
    num_blocks: int,
    check: Callable[[Node], str],
    choices: Choices = _DEFAULT_CHOICES,
) -> SimCluster:
    transport = TransportSettings(pool_dir=Path("/nonexistent"))
    checksum = rng.choice(("none", "xxh3_64"))
    local_prefill = rng.choice(choices.local_prefill)
    network = Network(rng, faults)
    return SimCluster(rng, network, transport, num_blocks, check, checksum, choices, local_prefill)
