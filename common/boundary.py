"""What stands between gRPC and a servicer, and between a stub and gRPC: see common/rpc.py."""

import asyncio
import hmac
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from common.errors import BatonError, InternalError, InvalidRequest, Unauthenticated
from common.status import abort_with, is_for_clients

log = logging.getLogger(__name__)

# Handlers of four shapes and of any message type pass through here; grpc's own types cannot say so.
Handler: TypeAlias = Any
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]
Context: TypeAlias = aio.ServicerContext[Any, Any]

_AUTHORIZATION = "authorization"
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_DENY_S = 1.0


class Boundary(aio.ServerInterceptor):
    """Turns bad messages and raised errors into statuses that tell a client what it may know."""

    def __init__(self, max_message_bytes: int | None) -> None:
        self._max_message_bytes = max_message_bytes

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        return None if handler is None else _guarded(handler, self._max_message_bytes)


class TokenCheck(aio.ServerInterceptor):
    """Refuses every call without the run's token but ``Health/Check``."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        if handler_call_details.method == _HEALTH_CHECK:
            return await continuation(handler_call_details)
        given = ""
        for key, value in handler_call_details.invocation_metadata or ():
            if key == _AUTHORIZATION and isinstance(value, str):
                given = value
        if hmac.compare_digest(given.encode(), self._expected):
            return await continuation(handler_call_details)
        # Answers for a method of any shape.
        return grpc.stream_stream_rpc_method_handler(_deny)


async def _deny(requests: AsyncIterator[bytes], context: Context) -> None:
    # A client whose first write fails because the call is over reports INTERNAL, not our status.
    with suppress(TimeoutError):
        async with asyncio.timeout(_DENY_S):
            await anext(requests, None)
    await abort_with(context, Unauthenticated("this call needs the run's token"))


class _Bad:
    """Stands in for a message that could not be had; ``error`` says why."""

    def __init__(self, error: BatonError) -> None:
        self.error = error


def _guarded(handler: Handler, max_bytes: int | None) -> Handler:
    make, behaviour = {
        (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    }[handler.request_streaming, handler.response_streaming]
    opened: Callable[[Any], Any] = _opened_stream if handler.request_streaming else _opened

    async def call(request: object, context: Context) -> object:
        async with _errors_as_statuses(context):
            return await behaviour(opened(request), context)

    async def stream(request: object, context: Context) -> AsyncIterator[object]:
        async with (
            _errors_as_statuses(context),
            aclosing(behaviour(opened(request), context)) as replies,
        ):
            async for reply in replies:
                yield reply

    if inspect.isasyncgenfunction(behaviour):
        guarded: Any = stream
    elif inspect.iscoroutinefunction(behaviour):
        guarded = call
    else:
        return handler
    return make(
        guarded,
        request_deserializer=_checked(handler.request_deserializer, max_bytes),
        response_serializer=handler.response_serializer,
    )


def _checked(parse: Callable[[bytes], object], max_bytes: int | None) -> Callable[[bytes], object]:
    """``parse``, with a `_Bad` for what it cannot parse: a deserializer that raises would show its
    exception to the client."""

    def checked(data: bytes) -> object:
        if max_bytes is not None and len(data) > max_bytes:
            return _Bad(InvalidRequest("message", f"{len(data)} bytes, at most {max_bytes}"))
        try:
            return parse(data)
        except DecodeError:
            return _Bad(InvalidRequest("message", "not a valid protobuf message of this method"))

    return checked


def _opened(request: object) -> object:
    if isinstance(request, _Bad):
        raise request.error
    return request


async def _opened_stream(requests: AsyncIterator[object]) -> AsyncIterator[object]:
    async for request in requests:
        yield _opened(request)


@asynccontextmanager
async def _errors_as_statuses(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except aio.AbortError:
        raise
    except BatonError as error:
        if not is_for_clients(error):
            log.exception("a handler failed")
        await abort_with(context, error)
    except Exception:
        log.exception("a handler failed")
        await abort_with(context, InternalError("internal error"))


class TokenChannel(aio.Channel):
    """A channel whose calls carry the run's token. Not a client interceptor: those change how
    streams are written and cancelled."""

    def __init__(self, channel: aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = ((_AUTHORIZATION, f"Bearer {token}"),)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_token(self._channel.stream_stream(*args, **kwargs))

    def _with_token(self, start_call: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, metadata: Any = (), **kwargs: Any) -> Any:
            return start_call(*args, metadata=(*(metadata or ()), *self._metadata), **kwargs)

        return start

    async def __aenter__(self) -> "TokenChannel":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()
