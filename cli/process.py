"""`baton gateway`, `baton prefill`, `baton decode`: one process each, as `up`, compose and
Kubernetes start them. Settings are checked before anything heavy is imported."""

import asyncio
from pathlib import Path
from typing import Any, TypeVar

import typer
import uvloop

from cli.models import prepared
from cli.settings_flags import ConfigFile, with_settings
from common.config import DecodeSettings, GatewaySettings, PrefillSettings, load
from common.ready import make_collections_rare

T = TypeVar("T", GatewaySettings, PrefillSettings, DecodeSettings)


@with_settings(GatewaySettings)
def gateway(config: ConfigFile = None, **settings: Any) -> None:
    """Run one gateway: gRPC for clients, dispatch to both pools."""
    loaded = _loaded(GatewaySettings, settings, config)
    from gateway.app import run

    raise typer.Exit(uvloop.run(run(loaded)))


@with_settings(PrefillSettings)
def prefill(config: ConfigFile = None, **settings: Any) -> None:
    """Run one prefill worker."""
    loaded = _loaded(PrefillSettings, settings, config)
    from prefill_worker.app import run

    raise typer.Exit(uvloop.run(run(loaded)))


@with_settings(DecodeSettings)
def decode(config: ConfigFile = None, **settings: Any) -> None:
    """Run one decode worker."""
    loaded = _loaded(DecodeSettings, settings, config)
    from decode_worker.app import run

    raise typer.Exit(uvloop.run(run(loaded)))


def _loaded(kind: type[T], flags: dict[str, Any], config: Path | None) -> T:
    """Settings whose model is prepared. What comes next imports much."""
    make_collections_rare()
    settings = load(kind, flags, config)
    return settings.model_copy(update={"model": asyncio.run(prepared(settings.model))})
