"""Which gateway a command talks to."""

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from cli.run_dir import find_run
from common.client import SyncBatonClient
from common.errors import ConfigError

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})", re.ASCII)

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        envvar="BATON_ADDRESS",
        metavar="HOST:PORT",
        help="gateway; default: that of the `baton up` running here",
    ),
]


def gateway_client(address: str | None) -> SyncBatonClient:
    """A client of that gateway, with the key in ``BATON_API_KEY`` and over TLS where
    ``BATON_CLIENT_CA_FILE`` names an authority. Raises ConfigError."""
    ca_file = os.environ.get("BATON_CLIENT_CA_FILE")
    return SyncBatonClient(
        gateway_address(address),
        api_key=os.environ.get("BATON_API_KEY", ""),
        tls_ca_file=Path(ca_file) if ca_file else None,
    )


def gateway_address(address: str | None) -> str:
    """Raises ConfigError when none is given and nothing runs here, or when it is no address."""
    if not address:
        return find_run().grpc[0]
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise ConfigError("address", f"{address!r} is not HOST:PORT")
    return address
