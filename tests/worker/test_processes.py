"""The real processes: ready line, admin port, hand-off over gRPC and shm, drain, hard stop."""

import asyncio
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common import rpc
from common.config import PROTOCOL_VERSION
from common.nats_bus import NatsBus
from common.nats_server import NatsServer
from common.wire import worker as wire
from common.wire import worker_grpc
from tests.worker.peers import FakeGateway
from tests.worker.rig import params, prompt, right_ids, state_of, until

TOKEN = "t0ken"


@dataclass
class Worker:
    child: asyncio.subprocess.Process
    ready: dict[str, Any]
    pool_dir: Path

    def get(self, path: str, token: str = TOKEN) -> str:
        request = urllib.request.Request(
            f"http://{self.ready['admin']}{path}", headers={"authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=5) as response:
            return str(response.read().decode())

    async def stop(self) -> int:
        self.child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            return await self.child.wait()


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats") / "run") as server:
        yield server


@asynccontextmanager
async def spawned(
    nats: NatsServer, role: str, folder: Path, **settings: object
) -> AsyncIterator[Worker]:
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    pool_dir = folder / "pools"
    pool_dir.mkdir(exist_ok=True)
    values = {
        "nats_url": nats.url,
        "nats_credentials_file": nats.credentials_file(role),
        "token_file": token_file,
        "pool_dir": pool_dir,
        "worker_id": f"{role}-1",
        "model": "oracle",
        "block_size": 4,
        "num_blocks": 64,
        "transport": "shm",
        "drain_budget_s": 5,
        **settings,
    }
    environment = {f"BATON_{name.upper()}": str(value) for name, value in values.items()}
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "cli.main",
        role,
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(60):
            line = await child.stdout.readline()
        yield Worker(child, json.loads(line), pool_dir)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@asynccontextmanager
async def gateway_on(nats: NatsServer) -> AsyncIterator[FakeGateway]:
    bus = await NatsBus.connect(nats.url, nats.credentials_file("gateway"), "gw-1")
    try:
        await bus.ensure_job_queue(60.0)
        gateway = FakeGateway(bus)
        await gateway.start()
        yield gateway
    finally:
        await bus.close()


class GrpcStream:
    def __init__(self, endpoint: str) -> None:
        self._channel = rpc.make_internal_channel(endpoint, TOKEN)
        self._call = worker_grpc.DecodeServiceStub(self._channel).Stream()

    async def send(self, **message: Any) -> None:
        await self._call.write(wire.StreamRequest(**message))

    async def next(self, kind: str) -> Any:
        while True:
            message = await self._call.read()
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


async def test_a_request_through_two_processes(nats: NatsServer, tmp_path: Path) -> None:
    ids = prompt(30)
    async with (
        gateway_on(nats) as gateway,
        spawned(nats, "prefill", tmp_path) as prefill,
        spawned(nats, "decode", tmp_path) as decode,
    ):
        for worker in (prefill, decode):
            assert worker.ready["ready"] and worker.ready["pid"] == worker.child.pid
            assert worker.get("/health") == ""
            assert "vllm:kv_cache_usage_perc{" in worker.get("/metrics")
            with pytest.raises(urllib.error.HTTPError, match="401"):
                worker.get("/debug/kv", token="wrong")
        assert len(list(prefill.pool_dir.iterdir())) == 2

        stream = await promised_stream(decode)
        state = state_of("r", 1, ids, sampling=params(12))
        await gateway.publish(state)
        result = (await gateway.ticket("r")).result
        kv = json.loads(prefill.get("/debug/kv"))
        assert kv["ledger"]["counts"]["leased"] == 8
        assert "secret" not in json.dumps(kv)

        state.output_ids.extend(result.token_ids)
        await stream.send(start=wire.Start(sequence=state, offer=result.offer))
        got = list(result.token_ids)
        while len(got) < 12:
            for tokens in (await stream.next("step_tokens")).sequences:
                assert tokens.index == len(got)
                got.extend(tokens.token_ids)
        assert got == right_ids(ids, 12)
        moved = json.loads(decode.get("/debug/statistics"))["imports"]["num_bytes"]["shm"]
        assert moved == 8 * 4 * 64
        await stream.close()
        for worker in (prefill, decode):
            counts = json.loads(worker.get("/debug/kv"))["ledger"]["counts"]
            assert not (counts["in_use"] or counts["leased"] or counts["importing"])
            assert await worker.stop() == 0
        assert list(prefill.pool_dir.iterdir()) == []


async def test_a_gateway_that_vanishes_and_a_second_signal(
    nats: NatsServer, tmp_path: Path
) -> None:
    async with spawned(nats, "decode", tmp_path, step_delay_ms=10, drain_budget_s=30) as decode:
        stream = await promised_stream(decode)
        state = state_of("r", 1, prompt(9), sampling=params(200))
        await stream.send(start=wire.Start(sequence=state))
        await stream.next("step_tokens")
        await stream.close()

        def is_free() -> bool:
            statistics = json.loads(decode.get("/debug/statistics"))
            return statistics["streams"] == 0 and statistics["engine"]["blocks"]["in_use"] == 0

        await until(is_free, 2)

        stream = await promised_stream(decode)
        decode.child.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        assert decode.child.returncode is None, "it did not wait for what it promised"
        decode.child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(1):
            assert await decode.child.wait() == 1
        assert list(decode.pool_dir.iterdir()) == []
        await stream.close()


async def promised_stream(decode: Worker) -> GrpcStream:
    stream = GrpcStream(decode.ready["grpc"])
    await stream.send(hello=wire.StreamHello(peer_id="gw-1", protocol_version=PROTOCOL_VERSION))
    assert (await stream.next("hello")).num_blocks == 64
    await stream.send(
        reserve=wire.Reserve(request_id="r", attempt=1, num_blocks=9, remaining_ms=60_000)
    )
    await stream.next("granted")
    return stream


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_one_signal_ends_a_worker_that_waits_for_nats(role: str, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    values = {
        "nats_url": "nats://127.0.0.1:1",
        "token_file": token_file,
        "pool_dir": tmp_path,
        "model": "oracle",
        "num_blocks": 8,
        "transport": "shm",
    }
    environment = {f"BATON_{name.upper()}": str(value) for name, value in values.items()}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", role),
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert child.stderr is not None
        async with asyncio.timeout(60):
            while b"NATS" not in await child.stderr.readline():
                pass
            child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await child.wait() == 0
        assert b"Traceback" not in await child.stderr.read()
        assert not [name for name in os.listdir(tmp_path) if name.startswith("baton-kv-")]
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
