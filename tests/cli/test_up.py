"""`baton up` as a user runs it: the real command and its real processes, on the oracle model."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.client import SyncBatonClient

START_S = 60
PROMPT = "--token-ids=" + ",".join(str(i % 500) for i in range(1, 41))


@dataclass
class Up:
    process: "subprocess.Popen[str]"
    ready: dict[str, Any]
    environment: dict[str, str]
    stderr: Path

    def baton(self, *arguments: str) -> dict[str, Any]:
        """Another command with --json, which finds this run by itself."""
        result = subprocess.run(
            [sys.executable, "-m", "cli.main", *arguments, "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            env=self.environment,
        )
        assert result.returncode == 0, result.stderr
        content: dict[str, Any] = json.loads(result.stdout)
        return content

    def workers(self) -> list[dict[str, Any]]:
        return list(self.baton("status")["workers"])

    def pids(self, role: str) -> set[int]:
        with SyncBatonClient(self.ready["grpc"]) as client:
            return {w.pid for w in client.list_workers().workers if w.role == role}

    def num_held_blocks(self) -> int:
        with SyncBatonClient(self.ready["grpc"]) as client:
            blocks = [worker.blocks for worker in client.list_workers().workers]
        return sum(counts.in_use + counts.leased + counts.importing for counts in blocks)


def start(directory: Path, *arguments: str) -> Up:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(directory)}
    stderr = directory / "stderr"
    with stderr.open("w") as errors:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "cli.main", "up", "--json", "--model", "oracle"),
                *("--grpc-port", "0", "--http-port", "0", "--num-blocks", "64"),
                # A prompt that was asked before would stay on the decode worker that has it.
                *("--pool-dir", str(directory), "--local-prefill", "never"),
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, stderr.read_text()
    return Up(process, json.loads(line), environment, stderr)


def stop(up: Up, number: int = signal.SIGTERM) -> None:
    """Ends it as a user does; nothing may stay behind."""
    children = psutil.Process(up.process.pid).children(recursive=True)
    up.process.send_signal(number)
    try:
        assert up.process.wait(30) == 0, up.stderr.read_text()
        assert "stopping: waiting up to 60 s" in up.stderr.read_text()
        assert not [child for child in children if child.is_running()]
    finally:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()
        assert up.process.stdout is not None
        assert up.process.stdout.read() == ""
        up.process.stdout.close()
    assert not list(Path(up.environment["XDG_RUNTIME_DIR"]).glob("baton/run-*"))


def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = start(tmp_path_factory.mktemp("up"), "--prefill", "1", "--decode", "1")
    yield running
    stop(running)


def test_the_ready_line(up: Up) -> None:
    assert list(up.ready) == ["ready", "grpc", "http", "workers"] and up.ready["ready"] is True
    assert sorted(w["role"] for w in up.ready["workers"]) == ["decode", "prefill"]
    children = {child.pid for child in psutil.Process(up.process.pid).children()}
    assert {w["pid"] for w in up.ready["workers"]} <= children
    host, port = up.ready["grpc"].split(":")
    assert host == "127.0.0.1" and int(port) > 0


def test_a_request_succeeds_at_once_and_its_trace_is_found(up: Up) -> None:
    answer = up.baton("generate", PROMPT, "--max-tokens", "8", "--temperature", "0")
    assert len(answer["token_ids"]) == 8 and answer["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 40
    trace = up.baton("trace", answer["request_id"])
    assert trace["trace_id"] == answer["trace_id"]
    services = {span["service"] for span in trace["spans"]}
    assert len(services) == 3, services


def test_the_gateways_log_has_a_line_for_the_request(up: Up) -> None:
    answer = up.baton("generate", PROMPT, "--max-tokens", "3")
    (path,) = Path(up.environment["XDG_RUNTIME_DIR"]).glob("baton/run-*/gateway-0.log")
    records = map(json.loads, path.read_text().splitlines())
    (line,) = (r for r in records if r.get("request_id") == answer["request_id"])
    assert line["trace_id"] == answer["trace_id"]
    assert line["message"].startswith("request: 40 + 3 tokens, ")
    assert line["message"].endswith(" ms, length")


def test_an_unknown_trace_says_how_many_are_kept(up: Up) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "cli.main", "trace", "nothing"],
        capture_output=True,
        text=True,
        timeout=60,
        env=up.environment,
    )
    assert result.returncode == 2 and "the last 1000 are kept" in result.stderr


def test_status_shows_what_moved_and_that_all_is_back(up: Up) -> None:
    up.baton("generate", PROMPT, "--max-tokens", "4")
    until(lambda: up.num_held_blocks() == 0)
    workers = {worker["role"]: worker for worker in up.workers()}
    assert {w["id"] for w in workers.values()} == {w["id"] for w in up.ready["workers"]}
    assert workers["decode"]["transport"] == "shm" and workers["decode"]["bytes_moved"] > 0
    for worker in workers.values():
        blocks = worker["blocks"]
        assert blocks["total"] == sum(count for name, count in blocks.items() if name != "total")


def test_engines_share_the_cores(up: Up) -> None:
    expected = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for worker in up.ready["workers"]:
        assert psutil.Process(worker["pid"]).environ()["OMP_NUM_THREADS"] == expected


def test_no_secret_is_on_any_command_line(up: Up) -> None:
    runtime = Path(up.environment["XDG_RUNTIME_DIR"])
    secrets = [path.read_text().strip() for path in runtime.glob("baton/run-*/token")]
    credentials = runtime.glob("baton/run-*/nats/nats-*.json")
    secrets += [json.loads(path.read_text())["password"] for path in credentials]
    assert len(secrets) == 4
    processes = psutil.Process(up.process.pid).children(recursive=True)
    lines = " ".join(" ".join(process.cmdline()) for process in processes)
    assert not [secret for secret in secrets if secret in lines]


def test_a_killed_worker_is_reported_and_started_again(up: Up) -> None:
    victim = next(w for w in up.workers() if w["role"] == "decode")
    os.kill(victim["pid"], signal.SIGKILL)
    until(lambda: up.pids("decode") not in (set(), {victim["pid"]}))
    until(lambda: victim["pid"] not in up.pids("decode"))
    assert "decode-0 was killed by SIGKILL" in up.stderr.read_text()
    until(lambda: re.search(r"decode-0 \(decode-\S+\) is ready", up.stderr.read_text()) is not None)
    answer = up.baton("generate", PROMPT, "--max-tokens", "4")
    assert len(answer["token_ids"]) == 4


def test_a_killed_nats_server_is_started_again(up: Up) -> None:
    (nats,) = (
        child
        for child in psutil.Process(up.process.pid).children()
        if "nats-server" in Path(child.exe()).name
    )
    nats.kill()
    until(lambda: "nats-server has died" in up.stderr.read_text())
    answer = up.baton("generate", PROMPT, "--max-tokens", "4")
    assert len(answer["token_ids"]) == 4


def test_a_port_that_is_taken_is_one_line_and_status_2(up: Up, tmp_path: Path) -> None:
    port = up.ready["grpc"].split(":")[1]
    result = subprocess.run(
        [
            *(sys.executable, "-m", "cli.main", "up", "--json", "--model", "oracle"),
            *("--grpc-port", port, "--http-port", "0", "--num-blocks", "64"),
            *("--pool-dir", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=START_S,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: grpc_port: 127.0.0.1:{port} is taken; ")
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.glob("baton/run-*"))


def test_ctrl_c_while_starting_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "cli.main", "up", "--model", "oracle"),
            *("--grpc-port", "0", "--http-port", "0"),
            *("--pool-dir", str(tmp_path), "--num-blocks", "64"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    until(lambda: len(psutil.Process(process.pid).children()) >= 2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert said.startswith("baton: preparing the model oracle\nbaton: starting nats-server\n")
    assert "waiting for prefill-0, decode-0, gateway-0" in said
    assert not [child for child in children if child.is_running()]
    assert not list(tmp_path.glob("baton/run-*"))
