"""Where a running `baton up` keeps its files, and how the other commands find it.

``$XDG_RUNTIME_DIR/baton`` (or ``/tmp/baton-<uid>``) holds one folder a run, readable by its owner
alone. The run holds a lock on its folder as long as it lives, so a folder whose lock is free was
left behind by a run that was killed: nobody is misled by it, and the next `up` removes it.
"""

import fcntl
import json
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import ConfigError, Unavailable

_STATE = "state.json"
_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class RunState:
    """What the other commands need to know. ``grpc`` are the gateways' public addresses;
    ``supervisor`` answers on loopback, with the token in ``token_file``. While ``starting`` nobody
    answers yet."""

    pid: int
    model: str
    grpc: tuple[str, ...]
    supervisor: str
    token_file: str
    processes: tuple[Mapping[str, str | int], ...]
    starting: bool = False


class RunDir:
    """Folder of one run; its lock is held until `close`."""

    def __init__(self) -> None:
        base = _base()
        _make_private(base)
        _sweep(base)
        name = f"run-{secrets.token_hex(8)}"
        # Locked before it bears a name that others look for.
        unnamed = base / f".{name}"
        unnamed.mkdir(mode=0o700)
        self._lock = os.open(unnamed / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = unnamed.rename(base / name)
        self.token_file = self.path / "token"
        write_private(self.token_file, secrets.token_urlsafe(32))

    def save(self, state: RunState) -> None:
        """Replaces the state file in one step."""
        temporary = self.path / f"{_STATE}.new"
        write_private(temporary, json.dumps(asdict(state)))
        temporary.rename(self.path / _STATE)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def find_run() -> RunState:
    """The newest run on this machine; says on stderr which it is if there are several. Raises
    ConfigError when there is none, Unavailable when it has not started yet."""
    found = _states()
    up = [state for state in found if not state.starting]
    if not found:
        raise ConfigError("address", "no `baton up` is running here; start one or give --address")
    if not up:
        raise Unavailable("`baton up` is still starting")
    if len(up) > 1:
        state = up[0]
        sys.stderr.write(
            f"baton: {len(up)} runs here; this is the newest, pid {state.pid} at {state.grpc[0]}\n"
        )
    return up[0]


def _states() -> list[RunState]:
    """Of all runs that live, the newest first."""
    found = []
    paths = [path for path in _base().glob(f"run-*/{_STATE}") if not _abandoned(path.parent)]
    for path in sorted(paths, key=_age_key, reverse=True):
        try:
            content = json.loads(path.read_text())
            content["grpc"] = tuple(content["grpc"])
            content["processes"] = tuple(content["processes"])
            found.append(RunState(**content))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)


def _base() -> Path:
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "baton"
    return Path("/tmp") / f"baton-{os.getuid()}"


def _make_private(base: Path) -> None:
    """Refuses a folder in /tmp that somebody else made under our name."""
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        stat = base.lstat()
    except OSError as error:
        raise ConfigError("run directory", f"cannot make {base}: {error.strerror}") from None
    if base.is_symlink() or stat.st_uid != os.getuid() or stat.st_mode & 0o077:
        raise ConfigError("run directory", f"{base} is not a folder of yours alone")


def _sweep(base: Path) -> None:
    for path in base.glob("run-*"):
        if _abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


def _abandoned(path: Path) -> bool:
    """Whether no process holds the folder's lock."""
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR)
    except OSError:
        return False  # being made, or gone
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _age_key(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
