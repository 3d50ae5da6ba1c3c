"""Who a worker is: its id, its role and the epoch of this start."""

import re
import secrets
import socket
import time
from dataclasses import dataclass

from common.config import WorkerSettings
from common.errors import ConfigError
from common.types import Epoch, Role, WorkerId

# An id is one token of a NATS subject and part of a file name.
_LEGAL_ID = re.compile(r"[A-Za-z0-9_-]{1,96}")


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """``epoch`` is new, and higher, at each start: an earlier process of this id is void."""

    worker_id: WorkerId
    role: Role
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where others reach this worker, host:port each."""

    grpc: str
    admin: str


def new_identity(settings: WorkerSettings, role: Role) -> WorkerIdentity:
    """Raises ConfigError where the configured id cannot be part of a subject."""
    worker_id = settings.worker_id or _default_id(role)
    if not _LEGAL_ID.fullmatch(worker_id):
        raise ConfigError("worker_id", "1 to 96 letters, digits, '-' or '_'")
    return WorkerIdentity(worker_id, role, time.time_ns())


def _default_id(role: Role) -> WorkerId:
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:48]
    return f"{role}-{host}-{secrets.token_hex(4)}"
