"""`baton gateway`, `baton prefill`, `baton decode`: one process each, as `up`, compose and
Kubernetes start them."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import typer
import uvloop

from cli.models import prepared
from cli.settings_flags import ConfigFile, with_settings
from common.config import (
    DecodeSettings,
    GatewaySettings,
    PrefillSettings,
    SettingsT,
    load,
)


@with_settings(GatewaySettings)
def gateway(config: ConfigFile = None, **settings: Any) -> None:
    """Run one gateway: gRPC for clients, dispatch to both pools."""
    from gateway.app import run

    _serve(GatewaySettings, run, config, settings)


@with_settings(PrefillSettings)
def prefill(config: ConfigFile = None, **settings: Any) -> None:
    """Run one prefill worker."""
    # Imported here: torch takes seconds, and no other command needs it.
    from prefill_worker.app import run

    _serve(PrefillSettings, run, config, settings)


@with_settings(DecodeSettings)
def decode(config: ConfigFile = None, **settings: Any) -> None:
    """Run one decode worker."""
    from decode_worker.app import run

    _serve(DecodeSettings, run, config, settings)


def _serve(
    kind: type[SettingsT],
    run: Callable[[SettingsT], Awaitable[int]],
    config: Path | None,
    flags: dict[str, Any],
) -> None:
    settings = load(kind, flags, config)
    model = str(getattr(settings, "model"))  # noqa: B009  (each of the three kinds has one)
    flags["model"] = asyncio.run(prepared(model))
    settings = load(kind, flags, config)

    async def main() -> int:
        return await run(settings)

    raise typer.Exit(uvloop.run(main()))
