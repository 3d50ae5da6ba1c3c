"""The keepers of `baton up`: real children and a real nats-server that do not come back at once."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cli import child as children
from cli import supervisor as supervisors
from cli.child import Child, ChildFailed, ChildSpec
from cli.supervisor import Supervisor
from common.nats_server import NatsServer

WAIT_S = 20.0
READY = (
    '{"id": "decode-a", "role": "decode", "pid": 1, "grpc": "h:1", "admin": "h:2", "http": "h:3"}\n'
)
# What a worker is to these tests: it says what the file tells it to say, and stays.
WORKER = """\
#!/bin/sh
cat "{said}"
exec sleep 600
"""


@pytest.fixture
def will_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Sets what the next child says; at first that it is ready."""
    said, worker = tmp_path / "said", tmp_path / "worker"
    said.write_text(READY)
    worker.write_text(WORKER.format(said=said))
    worker.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(worker))
    return said.write_text


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisors, "_BACKOFF_S", (0.05, 0.1))


@asynccontextmanager
async def running(
    folder: Path, *labels: str, on_change: Callable[[], None] = lambda: None
) -> AsyncIterator[tuple[Supervisor, NatsServer, list[str]]]:
    """A supervisor with these workers, and what it reports."""
    nats, reports = NatsServer(folder / "nats"), list[str]()
    (folder / "logs").mkdir()
    specs = [ChildSpec("decode", label, (), {}) for label in labels]
    supervisor = Supervisor(
        nats, specs, (), "token", folder / "logs", 1.0, reports.append, reports.append, on_change
    )
    with nats:
        try:
            await supervisor.start()
            yield supervisor, nats, reports
        finally:
            await supervisor.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def pid_of(child: Child) -> int:
    assert child._process is not None
    return child._process.pid


async def test_a_child_comes_back_whatever_kept_it_from_starting(
    will_say: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No log can be opened, then it says nothing, then something else than that it is ready."""
    changes: list[None] = []

    def on_change() -> None:
        changes.append(None)
        raise OSError("disk full")

    async with running(tmp_path, "decode-0", on_change=on_change) as (supervisor, _, reports):
        (child,) = supervisor.worker_children
        monkeypatch.setattr(children, "_START_S", 0.3)
        (tmp_path / "logs").rename(tmp_path / "away")
        os.kill(pid_of(child), signal.SIGKILL)
        await until(lambda: any("FileNotFoundError" in text for text in reports))
        will_say("")
        (tmp_path / "away").rename(tmp_path / "logs")
        await until(lambda: "decode-0 was not ready in 0.3 s" in reports)
        will_say("hello\n")
        await until(lambda: "decode-0 did not start: it said 'hello'" in reports)
        will_say(READY)
        await until(lambda: "decode-0 (decode-a) is ready" in reports)
        # Its keeper has not ended by what the change's listener raised either.
        assert len(changes) == 1
        os.kill(pid_of(child), signal.SIGKILL)
        await until(lambda: len(changes) == 2)


async def test_a_child_that_says_something_else_is_not_left_running(
    will_say: Callable[[str], object], tmp_path: Path
) -> None:
    will_say("[]\n")
    child = Child(ChildSpec("decode", "decode-0", (), {}), tmp_path)
    with pytest.raises(ChildFailed, match=r"it said '\[\]'"):
        await child.start()
    assert await child.wait() == -signal.SIGKILL


async def test_nats_server_comes_back_once_its_port_is_free(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, nats, reports):
        port = int(nats.url.rpartition(":")[2])
        os.kill(nats.pid, signal.SIGKILL)
        with take(port):
            failure = f"nats: nats-server did not start, see {tmp_path}/nats/nats-server.log"
            await until(lambda: reports.count(failure) >= 2)
        await until(lambda: greets(port))
        assert int(nats.url.rpartition(":")[2]) == port


async def test_nats_server_comes_back_after_an_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no process can be made: the binary is gone for a moment."""
    async with running(tmp_path) as (_, nats, reports):
        with monkeypatch.context() as patch:
            patch.setattr("common.nats_server.find_nats_server", lambda: "/nowhere/nats-server")
            os.kill(nats.pid, signal.SIGKILL)
            await until(lambda: any("FileNotFoundError" in text for text in reports))
        await until(lambda: greets(int(nats.url.rpartition(":")[2])))


def take(port: int) -> socket.socket:
    """Blocks until whoever has the port has left it, so that nobody else can come first."""
    while True:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port))


def greets(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as client:
        return client.recv(4) == b"INFO"
    return False
