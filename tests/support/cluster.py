"""A whole Baton on this machine for a test: `baton up`, its processes, and what they own.

The test gets the real command as a child process and everything below it; it kills only processes
that it started. Leaving the context checks that `baton up` ends with status 0 and leaves no process
and no pool file behind.
"""

import asyncio
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 90.0
STOP_S = 30.0


@dataclass
class WorkerProcess:
    worker_id: str
    role: str
    pid: int

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)


@dataclass
class Cluster:
    process: asyncio.subprocess.Process
    grpc: str
    gateways: list[str]
    workers: list[WorkerProcess]
    pool_dir: Path
    token: str
    log: Path
    leftovers: list[str] = field(default_factory=list)

    def of_role(self, role: str) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.role == role]

    def child(self, name: str) -> psutil.Process:
        """The child process of `baton up` whose command line has ``name`` in it."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if any(name in Path(part).name for part in child.cmdline()):
                return child
        raise AssertionError(f"no child process {name}")

    async def ledger(self, admin: str) -> dict[str, Any]:
        """``/debug/kv`` of one worker."""
        request = urllib.request.Request(  # noqa: S310 - loopback
            f"http://{admin}/debug/kv", headers={"authorization": f"Bearer {self.token}"}
        )

        def fetch() -> dict[str, Any]:
            with urllib.request.urlopen(request, timeout=5) as response:  # noqa: S310
                return dict(json.load(response))

        return await asyncio.to_thread(fetch)


@asynccontextmanager
async def baton_up(
    tmp_path: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    model: str = "oracle",
    flags: Sequence[str] = (),
    env: dict[str, str] | None = None,
) -> AsyncIterator[Cluster]:
    pool_dir = Path("/dev/shm") / f"baton-test-{os.getpid()}-{time.monotonic_ns()}"
    pool_dir.mkdir(mode=0o700)
    log = tmp_path / "up.log"
    command = [
        *(sys.executable, "-m", "cli.main", "up", "--json", "--grpc-port", "0"),
        *("--prefill", str(prefill), "--decode", str(decode), "--model", model),
        *("--pool-dir", str(pool_dir), *flags),
    ]
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            cwd=REPOSITORY,
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), **(env or {})},
        )
    try:
        yield await _ready(process, pool_dir, tmp_path, log)
    finally:
        await _stop(process, pool_dir, log)


async def _ready(
    process: asyncio.subprocess.Process, pool_dir: Path, tmp_path: Path, log: Path
) -> Cluster:
    assert process.stdout is not None
    async with asyncio.timeout(START_S):
        line = await process.stdout.readline()
    assert line, f"baton up did not start:\n{log.read_text()[-4000:]}"
    ready = json.loads(line)
    assert ready["ready"] is True
    state = json.loads(next((tmp_path / "baton").glob("run-*/state.json")).read_text())
    return Cluster(
        process=process,
        grpc=ready["grpc"],
        gateways=state["grpc"],
        workers=[WorkerProcess(w["id"], w["role"], w["pid"]) for w in ready["workers"]],
        pool_dir=pool_dir,
        token=Path(state["token_file"]).read_text().strip(),
        log=log,
    )


async def _stop(process: asyncio.subprocess.Process, pool_dir: Path, log: Path) -> None:
    children = []
    if process.returncode is None:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_S):
            status = await process.wait()
    except TimeoutError:
        process.kill()
        status = await process.wait()
    left = [child.cmdline() for child in children if child.is_running()]
    for child in children:
        if child.is_running():
            child.kill()
    files = sorted(path.name for path in pool_dir.iterdir())
    for path in pool_dir.iterdir():
        path.unlink()
    pool_dir.rmdir()
    text = log.read_text(errors="replace")
    assert status == 0, f"baton up ended with {status}:\n{text[-4000:]}"
    assert not left, f"processes left behind: {left}"
    assert not files, f"pool files left behind: {files}"
    assert "Traceback" not in text, text[-6000:]
