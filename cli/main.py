"""The command `baton`. Exit status: 0 done, 1 it failed, 2 it was asked for wrongly."""

import importlib.metadata
import sys
from typing import Annotated

import typer

from cli.bench.app import app as bench
from cli.chat import chat
from cli.credentials import credentials
from cli.demo import demo
from cli.generate import generate
from cli.kv_waste.command import kv_waste
from cli.plan import plan
from cli.prepare import prepare
from cli.process import decode, gateway, prefill
from cli.scale import scale
from cli.settings_flags import SettingsCommand
from cli.status import status
from cli.trace import trace
from cli.up import up
from common.errors import BatonError, ConfigError, InvalidRequest, Unsupported

_WRONGLY_ASKED = (ConfigError, InvalidRequest, Unsupported)

app = typer.Typer(
    name="baton",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=SettingsCommand)(up)
for command in (
    scale, generate, chat, status, trace, prepare, credentials, plan, kv_waste, demo,
):  # fmt: skip
    app.command()(command)
app.add_typer(bench, name="bench")
for command, name in ((gateway, "gateway"), (prefill, "prefill"), (decode, "decode")):
    app.command(name, cls=SettingsCommand, rich_help_panel="Single processes")(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            version = importlib.metadata.version("baton-serve")
        except importlib.metadata.PackageNotFoundError:
            version = "from a source tree"
        sys.stdout.write(f"baton {version}\n")
        raise typer.Exit


@app.callback()
def baton(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    """Serve a language model with its two phases in separate processes."""


def main() -> None:
    """An error is one line on stderr, without a traceback: those are for bugs."""
    try:
        app()
    except BatonError as error:
        sys.stderr.write(f"error: {_one_line(error.message)}\n")
        sys.exit(2 if isinstance(error, _WRONGLY_ASKED) else 1)


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
