"""Which gateway a command talks to."""

from typing import Annotated

import typer

from cli.run_dir import find_run

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
    """Raises ConfigError when no address is given and nothing runs here."""
    return address or find_run().grpc[0]
