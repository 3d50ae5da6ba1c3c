"""`baton trace` against a real receiver and a real supervisor service."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cli import trace as command
from cli.otlp import REQUEST_ID, OtlpReceiver
from cli.run_dir import RunDir, RunState
from cli.supervisor_service import SupervisorServer
from common.errors import InvalidRequest, Unauthenticated
from common.telemetry import Telemetry


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunDir]:
    """What a `baton up` leaves for the other commands, with one trace in it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    run_dir = RunDir()
    token = run_dir.token_file.read_text()
    receiver = OtlpReceiver(token)
    endpoint = await receiver.start()
    service = SupervisorServer(receiver, token)
    await service.start()
    state = RunState(1, "oracle", ("127.0.0.1:1",), service.address, str(run_dir.token_file), ())
    run_dir.save(state)
    await _send_one_trace(endpoint, token)
    yield run_dir
    await service.stop()
    await receiver.stop()
    run_dir.close()


async def _send_one_trace(endpoint: str, token: str) -> None:
    loop = asyncio.get_running_loop()
    gateway = Telemetry("baton-gateway", "gw", endpoint, loop.time, token)
    worker = Telemetry("baton-decode", "d1", endpoint, loop.time, token)
    root = gateway.start_span("request", attributes={REQUEST_ID: "r1"})
    with gateway.span("attempt", parent=root.carrier) as attempt:
        worker.record_span("fetch", 1.0, 1.25, attempt.carrier, {"baton.bytes": 4096})
        worker.record_span("decode", 2.0, 3.0, attempt.carrier, error="worker_lost")
    root.end()
    await gateway.shutdown()
    await worker.shutdown()


async def test_a_trace_is_found_by_either_id(run: RunDir) -> None:
    trace_id, spans = await command._fetch("r1")
    assert await command._fetch(trace_id) == (trace_id, spans)
    assert {span.name for span in spans} == {"request", "attempt", "fetch", "decode"}


async def test_the_tree_has_children_durations_and_errors(run: RunDir) -> None:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(command.tree_of(*await command._fetch("r1")))
    lines = capture.get().splitlines()
    indent = {
        name: next(line.index(f" {name}  ") for line in lines if f" {name}  " in line)
        for name in ("request", "attempt", "fetch", "decode")
    }
    assert indent["request"] < indent["attempt"] < indent["fetch"] == indent["decode"]
    assert any("fetch  250.0 ms" in line and "bytes=4096" in line for line in lines)
    assert any("decode  1000.0 ms" in line and "worker_lost" in line for line in lines)


async def test_json_has_every_span(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await asyncio.to_thread(command.trace, "r1", True)
    content = json.loads(capsys.readouterr().out)
    assert len(content["trace_id"]) == 32 and len(content["spans"]) == 4
    fetch = next(span for span in content["spans"] if span["name"] == "fetch")
    assert fetch["duration_ms"] == pytest.approx(250.0)
    assert fetch["attributes"] == {"baton.bytes": 4096}


async def test_an_unknown_trace_is_said_clearly(run: RunDir) -> None:
    with pytest.raises(InvalidRequest, match="no such trace"):
        await command._fetch("0" * 32)


async def test_only_the_runs_token_opens_it(run: RunDir) -> None:
    run.token_file.write_text("another")
    with pytest.raises(Unauthenticated):
        await command._fetch("r1")


async def test_what_a_decode_worker_sends_late_is_waited_for(run: RunDir) -> None:
    _, spans = await command._fetch("r1")
    assert command._complete(spans)
    (attempt,) = (span for span in spans if span.name == "attempt")
    named = replace(attempt, attributes={**attempt.attributes, "baton.decode_worker": "d1"})
    others = [span for span in spans if span.name != "attempt"]
    assert command._complete([named, *others])
    assert not command._complete([named, *(s for s in others if s.name != "decode")])
    root = [span for span in others if span.name == "request"]
    assert command._complete([replace(named, status="error"), *root])
