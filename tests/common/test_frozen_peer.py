"""A peer that is stopped, not dead: its sockets stay open, so only pings tell."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from grpc import aio

from common import errors
from common.rpc import (
    bind,
    make_internal_channel,
    make_public_server,
    to_baton_error,
)
from common.wire import inference, inference_grpc, worker, worker_grpc

pytestmark = pytest.mark.full

CLIENT = """
    import sys
    from common.client import SyncBatonClient
    with SyncBatonClient(sys.argv[1]) as client:
        for chunk in client.generate("x"):
            print(chunk.text, flush=True)
"""
SERVER = """
    import asyncio
    from common.rpc import bind, make_internal_server
    from common.wire import worker, worker_grpc

    class Decode(worker_grpc.DecodeServiceServicer):
        async def Stream(self, requests, context):
            async for request in requests:
                yield worker.StreamResponse(hello=request.hello)

    async def main():
        server = make_internal_server("token")
        worker_grpc.add_DecodeServiceServicer_to_server(Decode(), server)
        print(bind(server, "127.0.0.1", 0), flush=True)
        await server.start()
        await server.wait_for_termination()

    asyncio.run(main())
"""


@contextmanager
def child(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await asyncio.to_thread(process.stdout.readline)).strip()


class Holding(inference_grpc.InferenceServiceServicer):
    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def Generate(
        self, request: inference.GenerateRequest, context: Any
    ) -> AsyncIterator[inference.GenerateResponse]:
        yield inference.GenerateResponse(chunk=inference.Chunk(text="a"))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.mark.parametrize(("seconds", "survives"), [(1.5, True), (30, False)])
@pytest.mark.fault("F23")
async def test_a_frozen_client_is_gone_in_five_seconds(seconds: float, survives: bool) -> None:
    loop = asyncio.get_running_loop()
    servicer = Holding()
    server = make_public_server(1 << 20)
    inference_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    target = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    with child(CLIENT, target) as process:
        assert await line_of(process) == "a"
        os.kill(process.pid, signal.SIGSTOP)
        begin = loop.time()
        try:
            async with asyncio.timeout(min(seconds, 8)):
                await servicer.cancelled.wait()
        except TimeoutError:
            assert survives
        else:
            assert not survives and loop.time() - begin < 6
        os.kill(process.pid, signal.SIGCONT)
        if survives:
            await asyncio.sleep(3)
            assert not servicer.cancelled.is_set()
    await server.stop(0)


async def test_a_frozen_worker_is_noticed_and_a_short_freeze_is_not() -> None:
    loop = asyncio.get_running_loop()
    with child(SERVER) as process:
        port = await line_of(process)
        async with make_internal_channel(f"127.0.0.1:{port}", "token") as channel:
            call = worker_grpc.DecodeServiceStub(channel).Stream()
            hello = worker.StreamRequest(hello=worker.StreamHello(peer_id="g"))
            for _ in range(2):
                await call.write(hello)
                assert (await call.read()).hello.peer_id == "g"
                os.kill(process.pid, signal.SIGSTOP)
                await asyncio.sleep(1.5)
                os.kill(process.pid, signal.SIGCONT)
            os.kill(process.pid, signal.SIGSTOP)
            begin = loop.time()
            with pytest.raises(aio.AioRpcError) as caught:
                await call.read()
            assert loop.time() - begin < 9
            assert isinstance(to_baton_error(caught.value), errors.Unavailable)


async def test_without_our_timers_a_frozen_peer_is_not_noticed() -> None:
    """The negative twin: the same server, a channel with the defaults."""
    with child(SERVER) as process:
        port = await line_of(process)
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = worker_grpc.DecodeServiceStub(channel).Stream(
                metadata=(("authorization", "Bearer token"),)
            )
            await call.write(worker.StreamRequest(hello=worker.StreamHello(peer_id="g")))
            await call.read()
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(9):
                    await call.read()
