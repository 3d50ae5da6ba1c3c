"""Certificates made for a test, by the openssl command."""

import subprocess
from pathlib import Path

from common.tls import TlsFiles

_DAYS = "2"


def make_authority(folder: Path, name: str = "ca") -> tuple[Path, Path]:
    """Certificate and key of an authority of our own."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    _openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-keyout", str(key), "-out", str(cert), "-days", _DAYS, "-subj", f"/CN={name}"),
        *("-addext", "keyUsage=critical,keyCertSign"),
    )
    return cert, key


def make_tls_files(
    folder: Path,
    name: str,
    authority: tuple[Path, Path],
    alt_names: str = "IP:127.0.0.1,DNS:localhost",
) -> TlsFiles:
    """A certificate for client and server, signed by ``authority``."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    _openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-CA", str(authority[0]), "-CAkey", str(authority[1])),
        *("-keyout", str(key), "-out", str(cert), "-days", _DAYS, "-subj", f"/CN={name}"),
        *("-addext", f"subjectAltName={alt_names}"),
        *("-addext", "basicConstraints=critical,CA:FALSE"),
    )
    return TlsFiles(cert, key, authority[0])


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, text=True)
