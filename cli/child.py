"""One child process of `baton up`: started, announced ready by one line of JSON, stopped."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.child import die_with_parent
from common.errors import BatonError, ConfigError

# Weights may come from a slow disk.
_START_S = 300.0
_CONFIG_ERROR_STATUS = 2


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """``label`` is <pool>-<index>. ``first_arguments`` are given at the first start only:
    failpoints, which would otherwise kill every successor too."""

    role: str
    label: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    first_arguments: Sequence[str] = ()

    @property
    def pool(self) -> str:
        return self.label.rpartition("-")[0]

    @property
    def index(self) -> int:
        return int(self.label.rpartition("-")[2])


@dataclass(frozen=True, slots=True)
class Ready:
    """What a child says when it is ready."""

    id: str
    role: str
    pid: int
    grpc: str
    admin: str
    http: str


class ChildFailed(BatonError):
    """The child ended before it was ready."""


class Child:
    """``ready`` and ``process`` are those of the latest start."""

    def __init__(self, spec: ChildSpec, log_dir: Path) -> None:
        self.spec = spec
        self.ready: Ready | None = None
        self._log = log_dir / f"{spec.label}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._asked_to_stop = False
        self._starts = 0

    async def start(self) -> Ready:
        """Returns when the child is ready. Raises ConfigError or ChildFailed with the last line of
        its log. To be called on the main thread (see `die_with_parent`)."""
        first = self.spec.first_arguments if self._starts == 0 else ()
        # A gateway's free ports are chosen once: clients go on with the address that they know.
        ports: Sequence[str] = ()
        if self.spec.role == "gateway" and self.ready is not None:
            grpc, http = (a.rpartition(":")[2] for a in (self.ready.grpc, self.ready.http))
            ports = ("--grpc-port", grpc, "--http-port", http)
        self._starts += 1
        self._asked_to_stop = False
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "cli.main", self.spec.role,
                *self.spec.arguments, *first, *ports,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self.spec.environment},
                preexec_fn=die_with_parent(),
                # Ctrl-C in the terminal is ours to pass on, in order.
                start_new_session=True,
            )  # fmt: skip
        try:
            self.ready = self._parse(await self._first_line())
        except BaseException:
            self.signal(signal.SIGKILL)
            raise
        return self.ready

    async def wait(self) -> int:
        assert self._process is not None, "not started"
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, then SIGKILL after ``grace_s``. Returns the exit status. May be called again
        meanwhile: a second SIGTERM would end the drain that the first has begun."""
        if self._process is None:
            return 0
        if not self._asked_to_stop:
            self._asked_to_stop = True
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            self.signal(signal.SIGKILL)
            status = await self._process.wait()
        return status

    async def _first_line(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(_START_S):
                line = await self._process.stdout.readline()
                if line:
                    return line
                status = await self._process.wait()
        except TimeoutError:
            raise ChildFailed(f"{self.spec.label} was not ready in {_START_S:g} s") from None
        reason = self._last_line() or f"ended with status {status}"
        if status == _CONFIG_ERROR_STATUS:
            setting, _, text = reason.removeprefix("error: ").partition(": ")
            raise ConfigError(setting, text or "cannot be used")
        raise ChildFailed(f"{self.spec.label} did not start: {reason}")

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _parse(self, line: bytes) -> Ready:
        try:
            content: dict[str, Any] = json.loads(line)
            return Ready(
                id=str(content["id"]),
                role=str(content["role"]),
                pid=int(content["pid"]),
                grpc=str(content["grpc"]),
                admin=str(content["admin"]),
                http=str(content["http"]),
            )
        except (ValueError, KeyError, TypeError):
            said = line.decode(errors="replace").strip()
            raise ChildFailed(f"{self.spec.label} did not start: it said {said!r}") from None
