"""A whole Baton for a measurement: `baton up` as a child process, and what its workers count."""

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

from cli.bench.target import GrpcTarget
from cli.otlp import TraceSpan, spans_of
from cli.run_dir import RunState
from common import rpc
from common.config import read_secret
from common.errors import ConfigError
from common.wire import supervisor, supervisor_grpc

_STOP_S = 90.0
_CALL_S = 10.0


class Setup:
    """One running `baton up`."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._token = read_secret(Path(state.token_file), "token_file")
        self.grpc = state.grpc[0]
        (self.http, *_) = (str(p["http"]) for p in state.processes if p["role"] == "gateway")

    @asynccontextmanager
    async def target(self) -> AsyncIterator[GrpcTarget]:
        target = GrpcTarget(self.grpc)
        try:
            yield target
        finally:
            await target.close()

    def statistics(self) -> list[dict[str, Any]]:
        """Of every worker, as its debug page has them, with its ``role`` on top."""
        found = []
        for process in self._state.processes:
            if process["role"] != "gateway":
                page = self._fetch(str(process["admin"]), "statistics")
                found.append({"role": process["role"], **page})
        return found

    def total(self, counter: str) -> int:
        """Sum of one counter over all workers' engines."""
        return sum(int(worker["engine"][counter]) for worker in self.statistics())

    async def spans(self, trace_id: str) -> list[TraceSpan]:
        """All spans of one trace that have come so far."""
        channel = rpc.make_internal_channel(self._state.supervisor, self._token)
        try:
            stub = supervisor_grpc.SupervisorServiceStub(channel)
            found = await stub.GetTrace(supervisor.GetTraceRequest(id=trace_id), timeout=_CALL_S)
        finally:
            await channel.close()
        return spans_of(found.resource_spans)

    def _fetch(self, admin: str, page: str) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://{admin}/debug/{page}", headers={"authorization": f"Bearer {self._token}"}
        )
        with urllib.request.urlopen(request, timeout=_CALL_S) as response:
            return dict(json.load(response))


@asynccontextmanager
async def baton(*flags: str) -> AsyncIterator[Setup]:
    """`baton up` with these flags, in a run folder of its own, so that no other command takes it
    for the user's. Raises ConfigError with its last words where it does not start."""
    with TemporaryDirectory(prefix="baton-bench-") as folder, TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cli.main", "up", "--json",
            "--grpc-port", "0", "--http-port", "0", *flags,
            env={**os.environ, "XDG_RUNTIME_DIR": folder},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            if not await process.stdout.readline():
                await process.wait()
                raise ConfigError("baton up", _last_line(errors))
            yield Setup(_state_in(Path(folder)))
        finally:
            await _stop(process)


def _state_in(folder: Path) -> RunState:
    (path,) = folder.glob("baton/run-*/state.json")
    return RunState(**json.loads(path.read_text()))


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "it did not start"


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
