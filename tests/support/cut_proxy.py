"""The network in front of one process, which a test can cut: nothing is refused and nothing closed,
bytes just go nowhere until it is healed.

::

    async with cut_proxy() as proxy:
        async with cluster.another("decode", *proxy.flags) as worker:   # all others dial the proxy
            proxy.cut()
            proxy.heal()
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

BEHIND, BEFORE = "127.0.0.1", "127.0.0.2"


class CutProxy:
    """Of a worker's internal gRPC port; its admin port is forwarded always."""

    def __init__(self, port: int, admin_port: int) -> None:
        self._port, self._admin_port = port, admin_port
        self._whole = asyncio.Event()
        self._whole.set()

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            *("--host", BEHIND, "--advertise-host", BEFORE),
            *("--port", str(self._port), "--admin-port", str(self._admin_port)),
        )

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["CutProxy"]:
        async with AsyncExitStack() as stack:
            for port, can_be_cut in ((self._port, True), (self._admin_port, False)):
                server = await asyncio.start_server(
                    _Forwarder(self, port, can_be_cut), BEFORE, port
                )
                stack.callback(server.close)
            yield self
            self.heal()

    async def until_whole(self) -> None:
        await self._whole.wait()


class _Forwarder:
    """Of one port: a connection behind for each in front."""

    def __init__(self, proxy: CutProxy, port: int, can_be_cut: bool) -> None:
        self._proxy, self._port, self._can_be_cut = proxy, port, can_be_cut

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            behind_reader, behind_writer = await asyncio.open_connection(BEHIND, self._port)
            await asyncio.gather(
                self._pump(reader, behind_writer), self._pump(behind_reader, writer)
            )
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while data := await reader.read(1 << 16):
                    if self._can_be_cut:
                        await self._proxy.until_whole()
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def cut_proxy() -> AsyncIterator[CutProxy]:
    with socket.socket() as one, socket.socket() as other:
        for free in (one, other):
            free.bind((BEHIND, 0))
        ports = [free.getsockname()[1] for free in (one, other)]
    async with CutProxy(*ports).running() as proxy:
        yield proxy
