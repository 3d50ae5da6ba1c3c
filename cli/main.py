"""The command `baton`. Exit status: 0 done, 1 it failed, 2 it was asked for wrongly."""

import importlib
import importlib.metadata
import sys
from collections.abc import Collection
from typing import Annotated

import typer

from cli.settings_flags import SettingsCommand
from common.errors import BatonError, ConfigError, InvalidRequest, Unsupported

_WRONGLY_ASKED = (ConfigError, InvalidRequest, Unsupported)

# Each command's module, in the order of the help; the function has the command's name.
_COMMANDS = {
    "up": "cli.up",
    "scale": "cli.scale",
    "generate": "cli.generate",
    "chat": "cli.chat",
    "status": "cli.status",
    "trace": "cli.trace",
    "prepare": "cli.prepare",
    "credentials": "cli.credentials",
    "plan": "cli.plan",
    "kv-waste": "cli.kv_waste.command",
    "demo": "cli.demo",
    "bench": "cli.bench.app",
    "gateway": "cli.process",
    "prefill": "cli.process",
    "decode": "cli.process",
}
_PROCESSES = ("gateway", "prefill", "decode")


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            version = importlib.metadata.version("baton-serve")
        except importlib.metadata.PackageNotFoundError:
            version = "from a source tree"
        sys.stdout.write(f"baton {version}\n")
        raise typer.Exit


def baton(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    """Serve a language model with its two phases in separate processes."""


def _app(names: Collection[str]) -> typer.Typer:
    """With these commands alone: half of the time that a process takes before its own imports went
    into those of commands that nobody had asked for."""
    app = typer.Typer(
        name="baton",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(baton)
    for name in names:
        module = importlib.import_module(_COMMANDS[name])
        if name == "bench":
            app.add_typer(module.app, name=name)
        elif name in _PROCESSES:
            command = app.command(name, cls=SettingsCommand, rich_help_panel="Single processes")
            command(getattr(module, name))
        else:
            cls = SettingsCommand if name == "up" else None
            app.command(name, cls=cls)(getattr(module, name.replace("-", "_")))
    return app


def main() -> None:
    """An error is one line on stderr, without a traceback: those are for bugs."""
    asked = sys.argv[1:2]
    try:
        _app(asked if asked and asked[0] in _COMMANDS else _COMMANDS)()
    except BatonError as error:
        sys.stderr.write(f"error: {_one_line(error.message)}\n")
        sys.exit(2 if isinstance(error, _WRONGLY_ASKED) else 1)


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
