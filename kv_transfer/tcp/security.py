"""Which connections may be plain, and the TLS of the others."""

import ssl

from common.errors import ConfigError
from common.tls import is_loopback
from kv_transfer.base import TransportSettings


def server_context(settings: TransportSettings) -> ssl.SSLContext | None:
    """What the data port speaks; None is plain. Raises ConfigError where bytes would leave this
    machine in the clear unasked."""
    if settings.tls is None or is_loopback(settings.host) or settings.insecure:
        require_plain_allowed(settings.host, settings.insecure)
        return None
    context = settings.tls.server_context()
    context.num_tickets = 0  # no session is ever resumed
    return context


def client_context(settings: TransportSettings) -> ssl.SSLContext | None:
    """For data ports that speak TLS; None: such a port cannot be read."""
    return settings.tls.client_context() if settings.tls is not None else None


def require_plain_allowed(host: str, insecure: bool) -> None:
    """Raises ConfigError unless ``host`` is loopback or the network was said to be trusted."""
    if not insecure and not is_loopback(host):
        raise ConfigError(
            "insecure_transfer",
            f"KV by tcp to {host} is not encrypted; give --tls-cert-file, --tls-key-file and "
            "--tls-ca-file, or --insecure-transfer if nobody else can read that network",
        )
