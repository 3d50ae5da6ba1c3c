"""The gateway process: NATS, gRPC, HTTP and signals around one Gateway.

Shutdown is a list of phases: not ready, no new requests, streams finish within the drain budget,
the server stops, links and NATS close, spans are sent.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Set
from contextlib import AsyncExitStack
from dataclasses import asdict

from grpc import aio

from common import failpoints, rpc
from common.admin import AdminServer
from common.config import GatewaySettings, advertised, read_token
from common.listener import host_port
from common.logging import setup_logging
from common.nats_bus import NatsBus
from common.ready import announce
from common.telemetry import Telemetry
from common.tls import TlsFiles
from common.wire import INFERENCE_SERVICE, inference_grpc, worker_grpc
from common.wire import worker as wire
from gateway.api_keys import load_api_keys
from gateway.decode_link import Dial
from gateway.gateway import Gateway
from gateway.http.server import make_http_server
from gateway.metrics import exposition
from gateway.offers import lease_key
from gateway.registry import WorkerEntry
from gateway.servicer import InferenceServicer
from gateway.serving import Service
from gateway.tokenizer import IdTokenizer, load_tokenizer

log = logging.getLogger(__name__)

_READY_POLL_S = 0.25
_OFFER_CALL_S = 2.0
_HTTP_CLOSE_S = 3.0
# For the status of a call whose last message is written.
_STATUS_S = 1.0


class InternalChannels:
    """One channel per internal endpoint, and what the gateway says over them."""

    def __init__(self, token: str, tls: TlsFiles | None) -> None:
        self._token = token
        self._tls = tls
        self._channels: dict[str, aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def _channel(self, endpoint: str) -> aio.Channel:
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = rpc.make_internal_channel(endpoint, self._token, self._tls)
            self._channels[endpoint] = channel
        return channel

    def dialer(self, entry: WorkerEntry) -> Dial:
        stub = worker_grpc.DecodeServiceStub(self._channel(entry.report.endpoint))

        async def dial(
            requests: AsyncIterator[wire.StreamRequest],
        ) -> AsyncIterator[wire.StreamResponse]:
            call = stub.Stream(requests)
            try:
                async for message in call:
                    yield message
            except aio.AioRpcError as error:
                raise rpc.to_baton_error(error) from None
            finally:
                call.cancel()

        return dial

    async def renew(self, offer: wire.Offer) -> bool:
        stub = worker_grpc.KVTransferServiceStub(self._channel(offer.endpoint))
        request = wire.RenewRequest(keys=[lease_key(offer)])
        try:
            response = await stub.Renew(request, timeout=_OFFER_CALL_S)
        except aio.AioRpcError as error:
            raise rpc.to_baton_error(error) from None
        return list(response.verdicts) == [wire.LEASE_VERDICT_OK]

    async def release(self, offer: wire.Offer) -> None:
        stub = worker_grpc.KVTransferServiceStub(self._channel(offer.endpoint))
        try:
            await stub.Release(wire.ReleaseRequest(key=lease_key(offer)), timeout=_OFFER_CALL_S)
        except aio.AioRpcError as error:
            raise rpc.to_baton_error(error) from None

    def keep(self, endpoints: Set[str]) -> None:
        """Closes the others, which a late renewal or release may have opened anew. Lets calls
        under way finish; should a worker be there again, it gets a new channel."""
        for endpoint in self._channels.keys() - endpoints:
            channel = self._channels.pop(endpoint)
            task = asyncio.get_running_loop().create_task(channel.close(grace=_OFFER_CALL_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        self.keep(frozenset())
        await asyncio.gather(*self._closing, return_exceptions=True)


async def run(settings: GatewaySettings) -> int:
    """Until SIGTERM or SIGINT; returns the exit status."""
    setup_logging("gateway", settings.log_level)
    failpoints.arm(settings.failpoints)
    loop = asyncio.get_running_loop()
    token = read_token(settings.token_file, "token_file")
    tokenizer = load_tokenizer(settings.model, settings.max_model_len, settings.quantization)
    keys = load_api_keys(settings.api_key_file)
    async with AsyncExitStack() as stack:
        telemetry = Telemetry(
            "baton-gateway",
            settings.gateway_id,
            settings.otlp_endpoint,
            loop.time,
            read_token(settings.otlp_token_file, "otlp_token_file"),
        )
        stack.push_async_callback(telemetry.shutdown)
        bus = await NatsBus.connect(
            settings.nats_url, settings.nats_credentials_file, settings.gateway_id, settings.tls
        )
        stack.push_async_callback(bus.close)
        channels = InternalChannels(token, settings.tls)
        stack.push_async_callback(channels.close)
        gateway = Gateway(settings, bus, channels.dialer, channels, tokenizer, telemetry, loop.time)
        stack.push_async_callback(gateway.close)
        await gateway.start()
        admin = AdminServer(
            host=settings.host,
            port=settings.admin_port,
            token=token,
            health=lambda: gateway.ready,
            metrics=lambda: exposition(gateway),
            debug={
                "gateway": lambda: asdict(gateway.statistics()),
                "ready": lambda: {"serving": gateway.ready, "workers": gateway.ready_workers()},
            },
            allow_failpoints=settings.allow_failpoints,
        )
        admin_port = await admin.start()
        stack.push_async_callback(admin.stop)
        gateway.admission.tokens_of_tenant.update(keys.max_queued_tokens())
        service = Service(
            gateway.parser, gateway.pipeline, telemetry, keys, gateway.admission.bounds
        )
        web = make_http_server(settings, gateway, service, tokenizer)
        http_port = await web.start()
        stack.push_async_callback(web.stop, _HTTP_CLOSE_S)
        server, health, port = await _serve(settings, gateway, service, tokenizer)
        stack.push_async_callback(server.stop, _STATUS_S)
        follower = loop.create_task(_follow_readiness(gateway, health))
        stack.callback(follower.cancel)
        host = advertised(settings)
        announce(
            settings.gateway_id,
            "gateway",
            grpc=host_port(host, port),
            admin=host_port(host, admin_port),
            http=host_port(host, http_port),
        )
        await _until_signal()
        await _drain(gateway, service, settings.drain_budget_s)
    return 0


async def _serve(
    settings: GatewaySettings, gateway: Gateway, service: Service, tokenizer: IdTokenizer
) -> tuple[aio.Server, rpc.Health, int]:
    server = rpc.make_public_server(settings.max_message_bytes)
    servicer = InferenceServicer(settings.gateway_id, service, gateway.registry, tokenizer)
    inference_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    health = rpc.Health(server, [INFERENCE_SERVICE])
    if settings.reflection:
        rpc.enable_reflection(server, [INFERENCE_SERVICE])
    tls = settings.public_tls
    port = rpc.bind(server, settings.host, settings.grpc_port, tls, setting="grpc_port")
    await server.start()
    return server, health, port


async def _follow_readiness(gateway: Gateway, health: rpc.Health) -> None:
    """Health says SERVING exactly while a request would be taken; the log says what is missing."""
    told = None
    while True:
        if (reason := gateway.not_ready_because) != told:
            told = reason
            log.info("%s", f"not ready: {reason}" if reason else "ready")
            await health.set_ready(not reason)
        await asyncio.sleep(_READY_POLL_S)


async def _until_signal() -> None:
    """Returns at the first SIGTERM or SIGINT; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            os._exit(1)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await stopping.wait()


async def _drain(gateway: Gateway, service: Service, budget_s: float) -> None:
    """No new requests; those in flight may finish within the budget, to the last message."""
    gateway.pipeline.draining = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(budget_s):
            await service.idle()
