"""The servers of `bench.peers`: how each is started, waited for and stopped."""

import argparse
import asyncio
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from openai import InternalServerError

from bench.peer_client import PeerClient
from cli.model_cache import default_cache_dir, prepare_entry
from cli.prepare import DEFAULT_MODEL, find_source

ROOT = Path(__file__).parents[1]
NUM_CORES = len(os.sched_getaffinity(0))
MAX_LEN = 1024
READY_S = 300.0


class Absent(Exception):
    """The peer's program is not here."""


@dataclass(frozen=True, slots=True)
class Program:
    """One process: what to run, on which port it answers."""

    arguments: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setup:
    """The last program answers clients; one before it is a prefill server that they ask first.
    ``polls``: its processes look for work all the time, and take a core each for that."""

    name: str
    model: str
    programs: Sequence[Program]
    polls: bool = False


@dataclass(slots=True)
class Contestant:
    name: str
    command: str
    client: PeerClient
    processes: list[psutil.Process]
    polls: bool

    @contextmanager
    def held(self) -> Iterator[None]:
        """Its processes stand still meanwhile, if they would poll."""
        all_of_them = [p for parent in self.processes for p in (parent, *parent.children(True))]
        held = all_of_them if self.polls else []
        for process in held:
            process.suspend()
        try:
            yield
        finally:
            for process in held:
                process.resume()

    def memory_mb(self) -> dict[str, int]:
        """Resident size of every process."""
        return {
            f"{process.name()} {process.pid}": process.memory_info().rss >> 20
            for parent in self.processes
            for process in (parent, *parent.children(recursive=True))
        }


def contestants(given: argparse.Namespace) -> dict[str, Setup]:
    entry = prepare_entry(find_source(DEFAULT_MODEL), default_cache_dir(), lambda *_: None)
    folder = str(given.hf_model or entry)
    both = ("--prefill", "0", "--decode", "0", "--colocated", "1")
    name = "SmolLM2-135M-Instruct"
    return {
        "baton-int4": Setup("baton-int4", name, [_baton(*both, "--quantization", "int4")]),
        "baton-fp32": Setup("baton-fp32", name, [_baton(*both)]),
        "baton-1p1d": Setup("baton-1p1d", name, [_baton("--prefill", "1", "--decode", "1")]),
        "llama.cpp": Setup("llama.cpp", name, [_llama(given.llama, entry)]),
        "vllm": Setup("vllm", folder, [_vllm(given.vllm, folder)]),
        "vllm-1p1d": Setup(
            "vllm-1p1d",
            folder,
            [_vllm_half(given.vllm, folder, core) for core in (0, 1)],
            polls=True,
        ),
    }


def _baton(*flags: str) -> Program:
    port = _free_port()
    up = (sys.executable, "-m", "cli.main", "up", "--json", "--grpc-port", "0")
    return Program((*up, "--http-port", str(port), *flags), port)


def _llama(binary: str, entry: Path) -> Program:
    (gguf,) = entry.glob("*.gguf")
    port, slots = _free_port(), 32
    arguments = (
        binary, "-m", str(gguf), "--port", str(port), "-t", str(NUM_CORES), "-np", str(slots),
        "-c", str(slots * MAX_LEN), "--cont-batching", "--no-webui",
    )  # fmt: skip
    return Program(arguments, port)


def _vllm(binary: str, folder: str, *flags: str, port: int = 0) -> Program:
    port = port or _free_port()
    arguments = (
        binary, "serve", folder, "--port", str(port), "--dtype", "float32",
        "--max-model-len", str(MAX_LEN), "--no-enable-prefix-caching", *flags,
    )  # fmt: skip
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_CORES - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "PATH": f"{Path(binary).parent}:{os.environ['PATH']}",
    }
    return Program(arguments, port, environment)


def _vllm_half(binary: str, folder: str, core: int) -> Program:
    transfer = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'
    whole = _vllm(binary, folder, "--kv-transfer-config", transfer)
    own = {
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + core),
        "UCX_TLS": "tcp,cma,self",
    }
    return Program(whole.arguments, whole.port, {**whole.environment, **own})


@asynccontextmanager
async def started(setup: Setup) -> AsyncIterator[Contestant]:
    """Runs until the block ends; it has answered once. Raises Absent."""
    for program in setup.programs:
        if shutil.which(program.arguments[0]) is None:
            raise Absent(f"{program.arguments[0]} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder) / "log"
        children = [_start(program, folder, logs) for program in setup.programs]
        try:
            for child, program in zip(children, setup.programs, strict=True):
                await _ready(child, program.port, logs)
            urls = [f"http://127.0.0.1:{program.port}" for program in setup.programs]
            client = PeerClient(urls[-1], setup.model, urls[0] if len(urls) > 1 else None)
            await _first_answer(client)
            yield Contestant(
                setup.name,
                "; ".join(shlex.join(program.arguments) for program in setup.programs),
                client,
                [psutil.Process(child.pid) for child in children],
                setup.polls,
            )
        finally:
            for child in children:
                child.send_signal(signal.SIGTERM)
            for child in children:
                await asyncio.to_thread(child.wait)


def _start(program: Program, folder: str, logs: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "XDG_RUNTIME_DIR": folder, **program.environment}
    with logs.open("ab") as output:
        return subprocess.Popen(
            program.arguments, cwd=ROOT, env=environment, stdout=output, stderr=output
        )


async def _ready(child: subprocess.Popen[bytes], port: int, logs: Path) -> None:
    give_up_s = time.monotonic() + READY_S
    while not await asyncio.to_thread(_is_up, port):
        if child.poll() is not None or time.monotonic() > give_up_s:
            text = await asyncio.to_thread(logs.read_text, errors="replace")
            tail = text.splitlines()[-5:]
            raise Absent("it did not start: " + " | ".join(tail))
        await asyncio.sleep(0.5)


async def _first_answer(client: PeerClient) -> None:
    """A server may be up before its workers are."""
    give_up_s = time.monotonic() + READY_S
    while True:
        try:
            await client.generate(64, 4)
        except InternalServerError:
            if time.monotonic() > give_up_s:
                raise
            await asyncio.sleep(0.5)
        else:
            return


def _is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
