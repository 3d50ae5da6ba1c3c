"""Which gateway a command talks to."""

import re
from typing import Annotated

import typer

from cli.run_dir import find_run
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


def gateway_address(address: str | None) -> str:
    """Raises ConfigError when none is given and nothing runs here, or when it is no address."""
    if not address:
        return find_run().grpc[0]
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise ConfigError("address", f"{address!r} is not HOST:PORT")
    return address
