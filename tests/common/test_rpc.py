"""Servers and channels over real sockets: tokens, bad messages, raised errors, health."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import errors
from common.rpc import (
    Health,
    bind,
    enable_reflection,
    make_internal_channel,
    make_internal_server,
    make_public_channel,
    make_public_server,
    to_baton_error,
)
from common.wire import (
    DECODE_SERVICE,
    INFERENCE_SERVICE,
    inference,
    inference_grpc,
    worker,
    worker_grpc,
)

TOKEN = "a-token"
LIMIT = 1 << 20


class Inference(inference_grpc.InferenceServiceServicer):
    """Does as ``behave`` says; ``cancelled`` is set when a stream was."""

    def __init__(self, behave: Callable[[], None] = lambda: None) -> None:
        self._behave = behave
        self.cancelled = asyncio.Event()
        self.hold = False

    async def Generate(
        self, request: inference.GenerateRequest, context: Any
    ) -> AsyncIterator[inference.GenerateResponse]:
        try:
            yield inference.GenerateResponse(chunk=inference.Chunk(text=request.text))
            self._behave()
            if self.hold:
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def GetModelInfo(
        self, request: inference.GetModelInfoRequest, context: Any
    ) -> inference.GetModelInfoResponse:
        self._behave()
        return inference.GetModelInfoResponse(model="m")


class Decode(worker_grpc.DecodeServiceServicer):
    async def Stream(
        self, request_iterator: AsyncIterator[worker.StreamRequest], context: Any
    ) -> AsyncIterator[worker.StreamResponse]:
        async for request in request_iterator:
            hello = worker.StreamHello(peer_id=request.hello.peer_id + "!")
            yield worker.StreamResponse(hello=hello)


@asynccontextmanager
async def serving(
    server: aio.Server, channel_of: Callable[[str], aio.Channel]
) -> AsyncIterator[aio.Channel]:
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with channel_of(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


@asynccontextmanager
async def public(servicer: Inference) -> AsyncIterator[aio.Channel]:
    server = make_public_server(LIMIT)
    inference_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    async with serving(server, make_public_channel) as channel:
        yield channel


@asynccontextmanager
async def internal(token: str) -> AsyncIterator[aio.Channel]:
    server = make_internal_server(TOKEN)
    worker_grpc.add_DecodeServiceServicer_to_server(Decode(), server)
    health = Health(server, [DECODE_SERVICE])
    await health.set_ready(True)
    async with serving(server, lambda target: make_internal_channel(target, token)) as channel:
        yield channel


async def hellos() -> AsyncIterator[worker.StreamRequest]:
    for name in ("a", "b"):
        yield worker.StreamRequest(hello=worker.StreamHello(peer_id=name))


def raising(error: Exception) -> Callable[[], None]:
    def behave() -> None:
        raise error

    return behave


# ---------------------------------------------------------------- the run's token


async def test_a_stream_with_the_token() -> None:
    async with internal(TOKEN) as channel:
        call = worker_grpc.DecodeServiceStub(channel).Stream(hellos())
        assert [reply.hello.peer_id async for reply in call] == ["a!", "b!"]


@pytest.mark.parametrize("token", ["", "a-toke", "a-token2", "other"])
@pytest.mark.fault("V20")
async def test_no_stream_without_the_token(token: str) -> None:
    async with internal(token) as channel:
        call = worker_grpc.DecodeServiceStub(channel).Stream()
        await call.write(worker.StreamRequest(hello=worker.StreamHello(peer_id="a")))
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert isinstance(to_baton_error(caught.value), errors.Unauthenticated)
        silent = worker_grpc.DecodeServiceStub(channel).Stream()
        with pytest.raises(aio.AioRpcError) as caught:
            await silent.read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        unknown = channel.unary_unary("/baton.v1.DecodeService/Nothing")
        with pytest.raises(aio.AioRpcError) as caught:
            await unknown(b"")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_check_needs_no_token_and_watch_does() -> None:
    async with internal("wrong") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", DECODE_SERVICE):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.Watch(health_pb2.HealthCheckRequest(service="")).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_not_ready_is_not_serving_but_alive() -> None:
    server = make_public_server(LIMIT)
    health = Health(server, [INFERENCE_SERVICE])
    await health.set_ready(False)
    enable_reflection(server, [INFERENCE_SERVICE])
    async with serving(server, make_public_channel) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        states = {}
        for name in ("", INFERENCE_SERVICE):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            states[name] = reply.status
        response = health_pb2.HealthCheckResponse
        assert states == {"": response.SERVING, INFERENCE_SERVICE: response.NOT_SERVING}


# ---------------------------------------------------------------- bad messages


@pytest.mark.parametrize("shape", ["unary_unary", "unary_stream"])
@pytest.mark.fault("F33")
async def test_malformed_protobuf(shape: str) -> None:
    async with public(Inference()) as channel:
        if shape == "unary_unary":
            call: Any = channel.unary_unary("/baton.v1.InferenceService/GetModelInfo")(b"\xff\xff")
        else:
            method = channel.unary_stream("/baton.v1.InferenceService/Generate")
            call = method(b"\x12\x05ab").read()
        with pytest.raises(aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        text = caught.value.details() or ""
        assert text.startswith("message:") and "Decode" not in text and "Traceback" not in text


@pytest.mark.fault("F33")
async def test_malformed_protobuf_in_mid_stream() -> None:
    async with internal(TOKEN) as channel:
        method = channel.stream_stream("/baton.v1.DecodeService/Stream")

        async def requests() -> AsyncIterator[bytes]:
            yield worker.StreamRequest(hello=worker.StreamHello(peer_id="a")).SerializeToString()
            yield b"\xff\xff"

        call = method(requests())
        assert b"a!" in await call.read()
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.fault("F33")
async def test_bad_utf8() -> None:
    async with public(Inference()) as channel:
        method = channel.unary_stream("/baton.v1.InferenceService/Generate")
        with pytest.raises(aio.AioRpcError) as caught:
            await method(b"\x12\x02\xff\xfe").read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.fault("V18")
async def test_oversized_messages() -> None:
    async with public(Inference()) as channel:
        stub = inference_grpc.InferenceServiceStub(channel)
        fits = inference.GenerateRequest(text="x" * (LIMIT - 100))
        assert len([m async for m in stub.Generate(fits)]) == 1
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.Generate(inference.GenerateRequest(text="x" * LIMIT)).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(LIMIT) in (caught.value.details() or "")
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.Generate(inference.GenerateRequest(text="x" * 3 * LIMIT)).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


# ---------------------------------------------------------------- raised errors

ALL = [
    errors.InvalidRequest("sampling.top_p", "2.0 is above 1"),
    errors.Unsupported("sampling.best_of", "not in this release"),
    errors.ModelNotFound("no model 'x' here"),
    errors.Unauthenticated("no key"),
    errors.PermissionDenied("not yours"),
    errors.Overloaded("the queue is full", 2.5),
    errors.Unavailable("no prefill worker", pool="prefill", retry_after_s=0.5),
    errors.DeadlineExceeded("too late"),
    errors.RequestCancelled("gone"),
    errors.InternalError("internal error"),
]


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
async def test_errors_arrive_as_they_were_raised(error: errors.BatonError) -> None:
    async with public(Inference(raising(error))) as channel:
        stub = inference_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference.GenerateRequest(text="x"))
        await call.read()
        with pytest.raises(aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code().name == error.grpc_code
        got = to_baton_error(caught.value)
        assert type(got) is type(error)
        assert vars(got) == vars(error)
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.GetModelInfo(inference.GetModelInfoRequest())
        assert vars(to_baton_error(caught.value)) == vars(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("/secret/path"),
        errors.ConfigError("token_file", "/secret/path"),
        errors.LeaseRefused("/secret/path"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.fault("V5")
async def test_what_is_not_for_clients_stays_here(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with public(Inference(raising(error))) as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await inference_grpc.InferenceServiceStub(channel).GetModelInfo(
                inference.GetModelInfoRequest()
            )
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert caught.value.details() == "internal error"
        assert "secret" not in str(caught.value.trailing_metadata())
        assert "/secret/path" in caplog.text


async def test_a_cancel_reaches_the_handler_and_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servicer = Inference()
    servicer.hold = True
    async with public(servicer) as channel:
        stub = inference_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference.GenerateRequest(text="x"))
        await call.read()
        call.cancel()
        async with asyncio.timeout(2):
            await servicer.cancelled.wait()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_nobody_there_is_unavailable() -> None:
    async with make_public_channel("127.0.0.1:1") as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await inference_grpc.InferenceServiceStub(channel).GetModelInfo(
                inference.GetModelInfoRequest()
            )
        assert isinstance(to_baton_error(caught.value), errors.Unavailable)


async def test_a_port_in_use_is_a_config_error() -> None:
    one, other = make_public_server(LIMIT), make_public_server(LIMIT)
    port = bind(one, "127.0.0.1", 0)
    await one.start()
    with pytest.raises(errors.ConfigError, match=str(port)):
        bind(other, "127.0.0.1", port)
    await one.stop(0)
