"""gRPC servers and channels as Baton uses them, and errors across them.

Every server has a *boundary* around its handlers, so that a servicer simply raises:

- a message that does not parse, or is larger than the server allows: INVALID_ARGUMENT;
- a BatonError: its own status, with google.rpc details (see `abort_with`);
- anything else, a bug: logged, and INTERNAL without a word of what it was.

Between our own processes each call also carries the run's token. Option names and values are those
that vLLM's launcher uses, with shorter timers: without ``grpc.http2.ping_timeout_ms`` a frozen peer
goes unseen for 60 s. All the timers are in docs/design.md.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.boundary import Boundary, TokenChannel, TokenCheck
from common.errors import ConfigError, Unsupported
from common.listener import host_port, open_listener
from common.status import abort_with, to_baton_error
from common.tls import PublicTlsFiles, TlsFiles

__all__ = [
    "PUBLIC_CHANNEL_OPTIONS",
    "Channel",
    "Context",
    "Health",
    "abort_with",
    "bind",
    "calling",
    "enable_reflection",
    "make_internal_channel",
    "make_internal_server",
    "make_public_channel",
    "make_public_server",
    "to_baton_error",
]

Options: TypeAlias = Sequence[tuple[str, Any]]
Channel: TypeAlias = aio.Channel
Context: TypeAlias = aio.ServicerContext[Any, Any]

_COMMON: Final = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
)
_SERVER: Final = (
    *_COMMON,
    # Two servers on one port would each get half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
)
_CLIENT: Final = (
    *_COMMON,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
_INTERNAL: Final = (
    ("grpc.keepalive_time_ms", 3000),
    ("grpc.keepalive_timeout_ms", 4000),
    ("grpc.http2.ping_timeout_ms", 4000),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)
_PUBLIC: Final = (
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
)
# What a client of the public port uses; also for a synchronous channel.
PUBLIC_CHANNEL_OPTIONS: Final[Options] = (
    *_CLIENT,
    ("grpc.keepalive_time_ms", 10000),
    ("grpc.keepalive_timeout_ms", 4000),
    ("grpc.http2.ping_timeout_ms", 4000),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)


# ---------------------------------------------------------------- servers and channels


def make_internal_server(token: str) -> aio.Server:
    """For our own processes: every call but a health check must carry ``token``. Raises
    ConfigError when there is none."""
    if not token:
        raise ConfigError("token_file", "calls between processes need the run's token")
    return aio.server(
        interceptors=[TokenCheck(token), Boundary(None)], options=(*_SERVER, *_INTERNAL)
    )


def make_public_server(max_message_bytes: int) -> aio.Server:
    """For clients. A request above ``max_message_bytes`` is INVALID_ARGUMENT, naming the limit;
    above twice that it is not even read (RESOURCE_EXHAUSTED)."""
    limits = (
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", 2 * max_message_bytes),
    )
    return aio.server(
        interceptors=[Boundary(max_message_bytes)], options=(*_SERVER, *_PUBLIC, *limits)
    )


def bind(
    server: aio.Server,
    host: str,
    port: int,
    tls: TlsFiles | PublicTlsFiles | None = None,
    setting: str = "port",
) -> int:
    """Listens on ``host:port`` (0: a free one) and returns the port. With a ``tls`` that names an
    authority only those who show a certificate of it get as far as a call. Raises ConfigError that
    names ``setting``."""
    credentials = None
    if tls is not None:
        cert, key, ca = tls.read()
        credentials = grpc.ssl_server_credentials(
            [(key, cert)], ca, require_client_auth=ca is not None
        )
    try:
        if credentials is not None:
            return server.add_secure_port(host_port(host, port), credentials)
        return server.add_insecure_port(host_port(host, port))
    except RuntimeError:
        # gRPC does not say why.
        open_listener(host, port, setting).close()
        raise ConfigError(setting, f"cannot listen on {host_port(host, port)}") from None


def make_internal_channel(target: str, token: str, tls: TlsFiles | None = None) -> aio.Channel:
    """To one of our own processes; connects by itself, again and again. With ``tls`` the token
    goes only to who has a certificate for ``target``. Raises ConfigError."""
    options = (*_CLIENT, *_INTERNAL)
    if tls is None:
        return TokenChannel(aio.insecure_channel(target, options=options), token)
    cert, key, ca = tls.read()
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    return TokenChannel(aio.secure_channel(target, credentials, options=options), token)


def make_public_channel(target: str, tls_ca_file: Path | None = None) -> aio.Channel:
    """With the file of an authority: over TLS, to who has a certificate of it for ``target``.
    Raises ConfigError."""
    if tls_ca_file is None:
        return aio.insecure_channel(target, options=PUBLIC_CHANNEL_OPTIONS)
    return aio.secure_channel(target, public_credentials(tls_ca_file), PUBLIC_CHANNEL_OPTIONS)


def public_credentials(tls_ca_file: Path) -> grpc.ChannelCredentials:
    try:
        return grpc.ssl_channel_credentials(tls_ca_file.read_bytes())
    except OSError as error:
        raise ConfigError("tls_ca_file", f"cannot read {tls_ca_file}: {error.strerror}") from None


@contextmanager
def calling() -> Iterator[None]:
    """Around a call: what gRPC raises becomes one of our errors."""
    try:
        yield
    except grpc.RpcError as error:
        raise to_baton_error(error) from None


class _HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]
    async def List(self, request: object, context: Context) -> None:
        """The library's own would put a traceback into the log at each call of a stranger."""
        raise Unsupported("List", "ask Check for one service at a time")


class Health:
    """The standard health service: ``""`` says alive, a service's name says ready."""

    def __init__(self, server: aio.Server, service_names: Sequence[str]) -> None:
        self._servicer = _HealthServicer()
        self._service_names = service_names
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_ready(self, ready: bool) -> None:
        """NOT_SERVING in warm-up and drain; to be called once before the server starts."""
        states = health_pb2.HealthCheckResponse
        for name in self._service_names:
            await self._servicer.set(name, states.SERVING if ready else states.NOT_SERVING)
        await self._servicer.set("", states.SERVING)


def enable_reflection(server: aio.Server, service_names: Sequence[str]) -> None:
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
