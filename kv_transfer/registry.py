"""The transports by name, loaded when used, and which one two workers use."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from common.errors import ConfigError, PeerLost
from kv_transfer.base import (
    KVExporter,
    KVImporter,
    LoopbackAddress,
    Peer,
    ShmAddress,
    TcpAddress,
    TransportSettings,
)
from kv_transfer.memory import PoolKind, PoolMemory

log = logging.getLogger(__name__)

# name: (module, exporter class, importer class). Adding a backend is adding a line.
_TRANSPORTS = {
    "loopback": ("kv_transfer.loopback", "LoopbackExporter", "LoopbackImporter"),
    "shm": ("kv_transfer.shm", "ShmExporter", "ShmImporter"),
    "tcp": ("kv_transfer.tcp", "TcpExporter", "TcpImporter"),
}
_ADDRESS_OF = {"loopback": LoopbackAddress, "shm": ShmAddress, "tcp": TcpAddress}
# What `auto` stands for at one worker, best first.
_AUTO = ("shm", "tcp")


@dataclass(frozen=True, slots=True)
class Choice:
    transport: str
    reason: str


def transport_names(wanted: str) -> tuple[str, ...]:
    """The transports that a worker set to ``wanted`` offers and reads, best first."""
    if wanted == "auto":
        return _AUTO
    _entry(wanted)
    return (wanted,)


def pool_kind(wanted: str) -> PoolKind:
    """What `allocate_pool` must make for a worker set to ``wanted``."""
    return "shm" if "shm" in transport_names(wanted) else "plain"


def make_exporters(
    wanted: str, pool: PoolMemory, settings: TransportSettings
) -> dict[str, KVExporter]:
    """Raises ConfigError for a name that is not known or a transport that cannot work here;
    `auto` is content with those that can."""
    made: dict[str, KVExporter] = _make(wanted, 1, pool, settings)
    return made


def make_importers(
    wanted: str, pool: PoolMemory, settings: TransportSettings
) -> dict[str, KVImporter]:
    """As `make_exporters`."""
    made: dict[str, KVImporter] = _make(wanted, 2, pool, settings)
    return made


def choose(importers: Mapping[str, KVImporter], peer: Peer, same_host: bool) -> Choice:
    """The first of ``importers`` that really reaches ``peer``, which is then connected by it.

    shm counts only where both ends run under one kernel and the peer's pool file can be opened
    from here. Blocking: opens files and connections. Raises PeerLost telling why nothing works.
    """
    reasons = []
    for name, importer in importers.items():
        if not any(isinstance(address, _ADDRESS_OF[name]) for address in peer.addresses):
            reasons.append(f"{name}: not offered by {peer.worker_id}")
        elif name == "shm" and not same_host:
            reasons.append("shm: another host")
        else:
            try:
                importer.connect(peer)
            except PeerLost as error:
                reasons.append(f"{name}: {error.message}")
            else:
                return Choice(name, "; ".join([*reasons, f"{name}: reached"]))
    raise PeerLost("; ".join(reasons))


def _entry(name: str) -> tuple[str, str, str]:
    if name not in _TRANSPORTS:
        raise ConfigError("transport", f"{name!r} is not one of auto, {', '.join(_TRANSPORTS)}")
    return _TRANSPORTS[name]


def _make(wanted: str, column: int, pool: PoolMemory, settings: TransportSettings) -> Any:
    made = {}
    for name in transport_names(wanted):
        entry = _entry(name)
        try:
            made[name] = getattr(import_module(entry[0]), entry[column])(pool, settings)
        except ConfigError as error:
            if wanted != "auto" or (name == _AUTO[-1] and not made):
                raise
            log.info("%s is left out: %s", name, error.message)
    return made
