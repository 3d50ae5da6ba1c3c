"""Mutual TLS between our own processes: a certificate, its key, and the authority of the run; and
TLS towards clients, which is set apart (`PublicTlsFiles`).

Both ends of a link show a certificate that the authority has signed, and both check the other's;
the dialled end's must bear the name or address that was dialled (see ``--advertise-host``). One
authority for one set of processes: whoever has a certificate of it may connect (and still needs
the run's token). Without the files links are plain, which is for loopback, and for networks that
nobody else can read.
"""

import ipaddress
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from common.secret_files import is_exposed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. ``cert`` may be followed by its chain; ``key`` has no password."""

    cert: Path
    key: Path
    ca: Path

    def server_context(self) -> ssl.SSLContext:
        """Demands a certificate from the client. Raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._loaded(context)

    def client_context(self) -> ssl.SSLContext:
        """Checks the server's certificate and the name in it. Raises ConfigError."""
        return self._loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Certificate, key and authority, found to fit each other. Raises ConfigError."""
        self.client_context()
        return self.cert.read_bytes(), self.key.read_bytes(), self.ca.read_bytes()

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        return _loaded(context, self.cert, self.key, self.ca, prefix="tls")


@dataclass(frozen=True, slots=True)
class PublicTlsFiles:
    """What clients of the public ports see. With ``client_ca`` only those who show a certificate
    that it has signed get as far as a request."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def server_context(self) -> ssl.SSLContext:
        """Raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return _loaded(context, self.cert, self.key, self.client_ca, prefix="public_tls")

    def read(self) -> tuple[bytes, bytes, bytes | None]:
        """Certificate, key and the authority of clients, if any, found to fit each other. Raises
        ConfigError."""
        self.server_context()
        client_ca = None if self.client_ca is None else self.client_ca.read_bytes()
        return self.cert.read_bytes(), self.key.read_bytes(), client_ca


def _loaded(
    context: ssl.SSLContext, cert: Path, key: Path, ca: Path | None, prefix: str
) -> ssl.SSLContext:
    """``prefix``: how the names of the settings begin."""
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with _naming(f"{prefix}_key_file", key):
        if is_exposed(key.stat()):
            raise ConfigError(f"{prefix}_key_file", f"{key} is readable by others; chmod 600 it")
    if ca is not None:
        kind = "ca" if prefix == "tls" else "client_ca"
        with _naming(f"{prefix}_{kind}_file", ca):
            context.load_verify_locations(ca)
    with _naming(f"{prefix}_cert_file", cert):
        context.load_cert_chain(cert, key)
    return context


@contextmanager
def _naming(setting: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # ssl's errors are some too
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(setting, f"cannot use {path}: {reason}") from None


def warn_if_open(host: str, tls: TlsFiles | None) -> None:
    """Says what it means to listen on ``host`` without TLS, unless that is loopback."""
    if tls is None and not is_loopback(host):
        log.warning(
            "listening on %s without TLS: whoever can read this network reads the run's token, and "
            "with it every prompt and answer; give --tls-cert-file, --tls-key-file and "
            "--tls-ca-file, or keep others out of this network",
            host,
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
