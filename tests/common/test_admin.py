"""The admin port over a real socket: what is open, what needs the token, whose signals are."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from common.admin import AdminServer
from common.errors import ConfigError


class Worker:
    ready = False

    async def ledger(self) -> object:
        await asyncio.sleep(0)
        return {"blocks": {"free": 3}}


@asynccontextmanager
async def serving(worker: Worker, token: str = "t") -> AsyncIterator[int]:
    admin = AdminServer(
        host="127.0.0.1",
        port=0,
        token=token,
        health=lambda: worker.ready,
        metrics=lambda: "vllm:num_requests_running 1\n",
        debug={"kv": worker.ledger, "plain": lambda: [1, 2]},
    )
    port = await admin.start()
    try:
        yield port
    finally:
        await admin.stop()


async def get(port: int, path: str, authorization: str | None = None) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    header = f"Authorization: {authorization}\r\n" if authorization is not None else ""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header}\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body


async def test_health_and_metrics_are_open() -> None:
    worker = Worker()
    async with serving(worker) as port:
        assert await get(port, "/health") == (503, "")
        worker.ready = True
        assert await get(port, "/health") == (200, "")
        assert await get(port, "/metrics") == (200, "vllm:num_requests_running 1\n")
        assert (await get(port, "/"))[0] == 404


async def test_debug_needs_the_token() -> None:
    async with serving(Worker()) as port:
        for wrong in (None, "", "t", "Bearer", "Bearer tt", "Basic t", "Bearer \u00e9"):
            status, body = await get(port, "/debug/kv", wrong)
            assert status == 401 and "blocks" not in body
            assert (await get(port, "/debug/nothing", wrong))[0] == 401
        status, body = await get(port, "/debug/kv", "Bearer t")
        assert status == 200 and json.loads(body) == {"blocks": {"free": 3}}
        assert await get(port, "/debug/plain", "Bearer t") == (200, "[1,2]")
        assert (await get(port, "/debug/nothing", "Bearer t"))[0] == 404


async def test_without_a_token_debug_is_closed() -> None:
    async with serving(Worker(), token="") as port:
        for given in ("", "Bearer", "Bearer "):
            assert (await get(port, "/debug/kv", given))[0] == 401


async def test_signals_stay_the_process_own() -> None:
    before = signal.getsignal(signal.SIGTERM)
    async with serving(Worker()) as port:
        await get(port, "/health")
        assert signal.getsignal(signal.SIGTERM) is before


async def test_a_port_in_use() -> None:
    async with serving(Worker()) as port:
        other = AdminServer("127.0.0.1", port, "t", lambda: True, lambda: "", {})
        with pytest.raises(ConfigError, match="admin_port"):
            await other.start()


async def test_stop_with_an_idle_connection_open() -> None:
    async with serving(Worker()) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        begin = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - begin < 2.5
    writer.close()
