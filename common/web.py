"""uvicorn inside a process that has a loop and signals of its own."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from common.listener import open_listener

log = logging.getLogger(__name__)


class WebServer:
    """Serves in the running event loop, from `start` to `stop`. ``setting`` is what ConfigErrors
    about the address name; ``options`` are set on the listening socket and so on every connection.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        host: str,
        port: int,
        setting: str,
        options: tuple[tuple[int, int, int], ...] = (),
    ) -> None:
        self._server = _Server(config)
        self._host, self._port = host, port
        self._setting = setting
        self._options = options
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Returns the port (0 means a free one). Raises ConfigError where it cannot listen."""
        listener = open_listener(self._host, self._port, self._setting)
        for option in self._options:
            listener.setsockopt(*option)
        listener.setblocking(False)
        port: int = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve([listener]), name=self._setting)
        return port

    async def stop(self, timeout_s: float) -> None:
        """Connections under way have until uvicorn's own ``timeout_graceful_shutdown``."""
        if self._task is None:
            return
        self._server.end.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._task
        except TimeoutError:
            log.warning("%s did not close in time", self._setting)


class _Server(uvicorn.Server):
    """Signals belong to the process, not to one of its ports. Serves until ``end`` is set, instead
    of looking ten times a second whether it is to end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.end = asyncio.Event()

    async def main_loop(self) -> None:
        await self.end.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
