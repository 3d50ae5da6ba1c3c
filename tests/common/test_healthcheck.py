"""The health check of containers, against a real admin port."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from common.admin import AdminServer
from common.healthcheck import problem


class Process:
    def __init__(self) -> None:
        self.ready = True
        self.server = AdminServer("127.0.0.1", 0, "token", lambda: self.ready, lambda: "", debug={})


@pytest.fixture
async def process() -> AsyncIterator[tuple[Process, int]]:
    process = Process()
    port = await process.server.start()
    yield process, port
    await process.server.stop()


async def test_what_a_process_says(process: tuple[Process, int]) -> None:
    served, port = process
    assert await asyncio.to_thread(problem, port) == ""
    served.ready = False
    assert await asyncio.to_thread(problem, port) == "not ready; its log says why"
    assert await asyncio.to_thread(problem, port, "/nowhere") == f"port {port} answers 404"


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert problem(port) == f"port {port} does not answer: Connection refused"
