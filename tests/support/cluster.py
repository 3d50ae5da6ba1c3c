"""A whole Baton on this machine for a test: `baton up`, its processes, and what they own.

The test gets the real command as a child process and everything below it; it kills only processes
that it started. Leaving the context checks that `baton up` ends with status 0 and leaves no process
and no pool file behind, and that no process has logged a traceback.
"""

import asyncio
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cli.readiness import is_ready
from common.config import read_secret

REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 90.0
STOP_S = 30.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Process:
    """One process of the cluster, as it said itself when it was ready."""

    id: str
    role: str
    pid: int
    grpc: str
    admin: str
    http: str = ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)


@dataclass
class Cluster:
    """``grpc`` and ``http`` are the first gateway's addresses, ``gateways`` all for gRPC."""

    process: asyncio.subprocess.Process
    grpc: str
    http: str
    gateways: list[str]
    state_file: Path
    pool_dir: Path
    token: str
    log: Path

    @property
    def processes(self) -> list[Process]:
        """Gateways, then workers: those that `baton up` has running now, restarted ones too."""
        state = json.loads(self.state_file.read_text())
        return [Process(**process) for process in state["processes"]]

    @property
    def workers(self) -> list[Process]:
        return [process for process in self.processes if process.role != "gateway"]

    def of_role(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role]

    def child(self, name: str) -> psutil.Process:
        """The child process of `baton up` whose command line has ``name`` in it."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if any(name in Path(part).name for part in child.cmdline()):
                return child
        raise AssertionError(f"no child process {name}")

    # ------------------------------------------------------------ what they say

    async def debug(self, process: Process, page: str) -> dict[str, Any]:
        """``/debug/<page>`` of one process."""
        return await asyncio.to_thread(self._fetch, process.admin, page)

    async def ledger(self, worker: Process) -> dict[str, Any]:
        return await self.debug(worker, "kv")

    def _fetch(self, admin: str, page: str) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://{admin}/debug/{page}", headers={"authorization": f"Bearer {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            return dict(json.load(response))

    async def arm(self, process: Process, spec: str) -> None:
        """Arms failpoints in a running process, which must allow them; "" disarms. How often each
        place was reached since is ``debug(process, "failpoints")``."""
        await asyncio.to_thread(self._post, process.admin, spec)

    def _post(self, admin: str, spec: str) -> None:
        request = urllib.request.Request(
            f"http://{admin}/debug/failpoints",
            data=spec.encode(),
            headers={"authorization": f"Bearer {self.token}"},
        )
        with urllib.request.urlopen(request, timeout=10):
            pass

    async def held(self, others: Sequence[Process] = ()) -> list[str]:
        """What anyone still holds, ``others`` as well, which `baton up` did not start; empty when
        every ledger is as it was at the start."""
        held = []
        for process in (*self.processes, *others):
            page = "gateway" if process.role == "gateway" else "statistics"
            found = _busy(await self.debug(process, page))
            if process.role != "gateway":
                kv = await self.ledger(process)
                counts = kv["ledger"]["counts"]
                assert sum(counts.values()) == 2 * counts["total"], f"{process.id}: {counts}"
                found += [
                    f"{k} {counts[k]}" for k in ("in_use", "leased", "importing") if counts[k]
                ]
            held += [f"{process.id}: {what}" for what in found]
        return held

    async def until_clean(self, timeout_s: float = 10.0, others: Sequence[Process] = ()) -> None:
        """Until nobody holds anything."""
        deadline_s = time.monotonic() + timeout_s
        while held := await self.held(others):
            assert time.monotonic() < deadline_s, f"after {timeout_s:g} s still held: {held}"
            await asyncio.sleep(_POLL_S)

    async def until_back(self, replaced: Process) -> None:
        """Until `baton up` has started the successor of this killed process, and all gateways know
        all processes."""

        async def is_replaced() -> bool:
            return replaced.pid not in {process.pid for process in self.processes}

        await until(is_replaced, START_S)
        for gateway in self.of_role("gateway"):
            await self._until_known(gateway, lambda: {worker.id for worker in self.workers})

    async def until_known(self, worker_id: str) -> None:
        """Until all gateways have this worker."""
        for gateway in self.of_role("gateway"):
            await self._until_known(gateway, lambda: {worker_id})

    async def _until_known(self, gateway: Process, worker_ids: Callable[[], set[str]]) -> None:
        """Until the gateway has these workers (asked anew each time, since some may be on their way
        out), and a stream to every decode worker that it has."""

        async def is_linked() -> bool:
            if not await is_ready(gateway.admin, self.token, worker_ids()):
                return False
            statistics = await self.debug(gateway, "gateway")
            return bool(statistics["num_decode_links"] == statistics["num_decode_workers"])

        await until(is_linked, START_S)

    # ------------------------------------------------------------ one process more

    @asynccontextmanager
    async def another(self, role: str, *flags: str, joins: bool = True) -> AsyncIterator[Process]:
        """One more worker that all gateways know, or one more gateway that knows all workers
        (unless it is not to join them), started as `baton up` starts them but with these flags on
        top, and not started again when it dies. Ends it with SIGKILL if it is still there."""
        model = psutil.Process(self.of_role(role)[0].pid)
        with self.log.with_name(f"another-{role}-{time.monotonic_ns()}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *model.cmdline(), *flags,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=REPOSITORY,
                env=model.environ(),
            )  # fmt: skip
        try:
            assert process.stdout is not None
            async with asyncio.timeout(START_S):
                ready = json.loads(await process.stdout.readline())
            del ready["ready"]
            made = Process(**ready)
            if joins and role == "gateway":
                await self._until_known(made, lambda: {worker.id for worker in self.workers})
            elif joins:
                await self.until_known(made.id)
            yield made
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            # The next worker to start would remove it; here there may be none.
            for pool_file in self.pool_dir.glob(f"*-{ready['id']}-*"):
                pool_file.unlink()


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline_s, "it did not come true"
        await asyncio.sleep(_POLL_S)


def _busy(statistics: dict[str, Any], prefix: str = "") -> list[str]:
    """The gauges, at any depth, that are zero when nothing is going on."""
    idle = {
        "num_running", "num_waiting", "num_waiting_tokens", "num_unaccepted_jobs", "num_importing",
        "num_leased", "jobs", "sequences", "outbox_bytes", "promised_blocks", "promises", "waiting",
        "fetching", "offered", "claimed",
    }  # fmt: skip
    found = []
    for name, value in statistics.items():
        if isinstance(value, dict):
            found += _busy(value, f"{prefix}{name}.")
        elif name in idle and value:
            found.append(f"{prefix}{name} {value}")
    return found


@asynccontextmanager
async def baton_up(
    tmp_path: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    model: str = "oracle",
    local_prefill: str = "never",
    flags: Sequence[str] = (),
    env: dict[str, str] | None = None,
    allow_tracebacks: bool = False,
) -> AsyncIterator[Cluster]:
    """Prompts take the way over two workers, unless ``local_prefill`` says otherwise: the tests are
    of that way, and the rule's choice depends on measured times."""
    pool_dir = Path("/dev/shm") / f"baton-test-{os.getpid()}-{time.monotonic_ns()}"
    pool_dir.mkdir(mode=0o700)
    log = tmp_path / "up.log"
    command = [
        *(sys.executable, "-m", "cli.main", "up", "--json", "--grpc-port", "0"),
        *("--http-port", "0"),
        *("--prefill", str(prefill), "--decode", str(decode), "--model", model),
        *("--pool-dir", str(pool_dir), "--local-prefill", local_prefill, *flags),
    ]
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            cwd=REPOSITORY,
            env={
                **os.environ,
                "XDG_RUNTIME_DIR": str(tmp_path),
                "BATON_ON_LEDGER_FAULT": "raise",
                **(env or {}),
            },
        )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_stop, process, pool_dir, tmp_path, allow_tracebacks)
        yield await _ready(process, pool_dir, tmp_path)


async def _ready(process: asyncio.subprocess.Process, pool_dir: Path, tmp_path: Path) -> Cluster:
    assert process.stdout is not None
    log = tmp_path / "up.log"
    async with asyncio.timeout(START_S):
        line = await process.stdout.readline()
    assert line, f"baton up did not start:\n{log.read_text()[-4000:]}"
    ready = json.loads(line)
    assert ready["ready"] is True
    state_file = next((tmp_path / "baton").glob("run-*/state.json"))
    state = json.loads(state_file.read_text())
    for child_log in state_file.parent.glob("*.log"):
        # `baton up` removes its folder when it ends; what was logged stays under this name.
        os.link(child_log, tmp_path / child_log.name)
    return Cluster(
        process=process,
        grpc=ready["grpc"],
        http=ready["http"],
        gateways=list(state["grpc"]),
        state_file=state_file,
        pool_dir=pool_dir,
        token=read_secret(Path(state["token_file"]), "token_file"),
        log=log,
    )


async def _stop(
    process: asyncio.subprocess.Process, pool_dir: Path, log_dir: Path, allow_tracebacks: bool
) -> None:
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
    left = [child for child in children if child.is_running()]
    for child in left:
        child.kill()
    files, logs = _removed(pool_dir), _logs(log_dir)
    assert status == 0, f"baton up ended with {status}:\n{logs['up.log'][-4000:]}"
    assert not left, f"processes left behind: {left}"
    assert not files, f"pool files left behind: {files}"
    for name, text in logs.items():
        _, found, traceback = text.partition("Traceback")
        assert allow_tracebacks or not found, f"{name}:\nTraceback{traceback[:6000]}"


def _removed(folder: Path) -> list[str]:
    """Removes the folder; returns the names of the files that were in it."""
    paths = list(folder.iterdir())
    for path in paths:
        path.unlink()
    folder.rmdir()
    return sorted(path.name for path in paths)


def _logs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(errors="replace") for path in folder.glob("*.log")}
