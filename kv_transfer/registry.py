"""The transports by name, loaded when used, and which one two workers use."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from common.errors import ConfigError, PeerLost
from kv_transfer.base import KVExporter, KVImporter, Peer, TransportSettings
from kv_transfer.memory import PoolKind, PoolMemory

log = logging.getLogger(__name__)

# name: (module, exporter class, importer class). Adding a backend is adding a line.
_TRANSPORTS = {
    "loopback": ("kv_transfer.loopback", "LoopbackExporter", "LoopbackImporter"),
    "shm": ("kv_transfer.shm", "ShmExporter", "ShmImporter"),
    "tcp": ("kv_transfer.tcp", "TcpExporter", "TcpImporter"),
    "cuda_ipc": ("kv_transfer.cuda.ipc", "CudaIpcExporter", "CudaIpcImporter"),
    "gloo": ("kv_transfer.dist", "GlooExporter", "GlooImporter"),
    "nccl": ("kv_transfer.dist", "NcclExporter", "NcclImporter"),
    "nixl": ("kv_transfer.nixl", "NixlExporter", "NixlImporter"),
}
# Those between pools on GPUs only. nixl takes either; all others read host memory.
_ON_DEVICE = ("cuda_ipc", "nccl")
_ANYWHERE = ("nixl",)
# Those whose memory both ends must see.
_SAME_HOST = ("shm", "cuda_ipc")
# What `auto` stands for at one worker, best first.
_AUTO_ON_HOST = ("shm", "tcp")
_AUTO_ON_DEVICE = ("cuda_ipc", "nixl", "nccl")


@dataclass(frozen=True, slots=True)
class Choice:
    transport: str
    reason: str


def transport_names(wanted: str, on_device: bool = False) -> tuple[str, ...]:
    """The transports that a worker set to ``wanted`` offers and reads, best first; ``on_device``:
    its pool lies on a GPU."""
    if wanted == "auto":
        return _AUTO_ON_DEVICE if on_device else _AUTO_ON_HOST
    _entry(wanted)
    return (wanted,)


def pool_kind(wanted: str, device: str = "cpu") -> PoolKind:
    """What `allocate_pool` must make for a worker set to ``wanted`` that computes on ``device``.
    For a transport between GPUs always "cuda": a device that is none is refused where it is
    opened."""
    if device != "cpu" or wanted in _ON_DEVICE:
        return "cuda"
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

    What shares memory counts only where both ends run under one kernel, and then only if the
    peer's pool can be opened from here: shm by its file, cuda_ipc by its handle and its GPU's UUID.
    Blocking: opens files and connections. Raises PeerLost telling why nothing works.
    """
    reasons = []
    for name, importer in importers.items():
        if not peer.offers(name):
            reasons.append(f"{name}: not offered by {peer.worker_id}")
        elif name in _SAME_HOST and not same_host:
            reasons.append(f"{name}: another host")
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
    made: dict[str, Any] = {}
    names = transport_names(wanted, on_device=pool.device is not None)
    for name in names:
        entry = _entry(name)
        try:
            if pool.device is not None and name not in (*_ON_DEVICE, *_ANYWHERE):
                raise ConfigError("transport", f"{name} reads host memory; the pool is on a GPU")
            made[name] = getattr(import_module(entry[0]), entry[column])(pool, settings)
        except ConfigError as error:
            if wanted != "auto" or (name == names[-1] and not made):
                raise
            log.info("%s is left out: %s", name, error.message)
    return made
