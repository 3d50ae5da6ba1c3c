"""One `baton up --model null` in processes of its own, and what can be asked of it from outside."""

import asyncio
import json
import os
import signal
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from grpc import aio

from cli.otlp import spans_of
from cli.run_dir import RunState
from common import rpc
from common.config import read_secret
from common.wire import supervisor, supervisor_grpc

ROOT = Path(__file__).parents[1]
NUM_BLOCKS, BLOCK_SIZE = 8192, 16


class Deployment:
    """One running `baton up`, its processes by role."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.target = state.grpc[0]
        self._token = read_secret(Path(state.token_file), "token_file")
        self.processes = {
            str(entry["role"]): psutil.Process(int(entry["pid"])) for entry in state.processes
        }
        self.processes["up"] = up = psutil.Process(state.pid)
        known = {process.pid for process in self.processes.values()}
        (self.processes["nats"],) = [c for c in up.children() if c.pid not in known]

    def cpu_s(self) -> Counter[str]:
        """CPU seconds since its start of every process, by role."""
        return Counter({name: process_cpu_s(process) for name, process in self.processes.items()})

    def busiest_thread_s(self) -> Counter[str]:
        """CPU seconds since its start of the one thread of each process that has the most."""
        return Counter(
            {
                name: max(thread.user_time + thread.system_time for thread in process.threads())
                for name, process in self.processes.items()
            }
        )

    def step_ends(self) -> list[float]:
        """When the decode worker's latest steps ended, CLOCK_MONOTONIC."""
        (admin,) = [entry["admin"] for entry in self._state.processes if entry["role"] == "decode"]
        request = urllib.request.Request(
            f"http://{admin}/debug/steps", headers={"Authorization": f"Bearer {self._token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            return [step["end_s"] for step in json.load(response)]

    async def last_step_end(self, channel: aio.Channel, trace_id: str) -> float:
        """When the last decode step that served a request ended, CLOCK_MONOTONIC."""
        stub = supervisor_grpc.SupervisorServiceStub(channel)
        trace = await stub.GetTrace(supervisor.GetTraceRequest(id=trace_id), timeout=10)
        (run,) = [span for span in spans_of(trace.resource_spans) if span.name == "decode.run"]
        return run.end_ns / 1e9 - (time.time() - time.monotonic())

    def supervisor_channel(self) -> aio.Channel:
        return rpc.make_internal_channel(self._state.supervisor, self._token)


def process_cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _state_in(folder: str) -> RunState:
    (state,) = Path(folder).glob("baton/run-*/state.json")
    return RunState(**json.loads(state.read_text()))


@asynccontextmanager
async def deployment(
    steps_per_s: float, *flags: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Deployment]:
    """With these flags, which win over those given here, and this environment on top of ours."""
    with TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cli.main", "up", "--json", "--model", "null",
            "--grpc-port", "0", "--http-port", "0",
            "--num-blocks", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE),
            "--step-delay-ms", str(1000 / steps_per_s), "--async-depth", "1", *flags,
            cwd=ROOT,
            env={**os.environ, "XDG_RUNTIME_DIR": folder, **(environment or {})},
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            if not await process.stdout.readline():
                raise SystemExit("baton up did not start")
            yield Deployment(_state_in(folder))
        finally:
            process.send_signal(signal.SIGTERM)
            await process.wait()
