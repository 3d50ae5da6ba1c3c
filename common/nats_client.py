"""What nats-py's client itself needs: a flush that orders, an end that ends, plain reasons."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import nats
import nats.errors

from common.nats_calls import CALL_S

log = logging.getLogger(__name__)


class NatsClient(nats.NATS):  # type: ignore[misc] # nats-py has no types
    """Forgets what waits to be sent when its connection has failed. nats-py would still write it
    while it closes, and uvloop refuses a closed transport with an error that nobody catches."""

    async def _process_op_err(self, e: Exception) -> None:
        self._pending.clear()
        self._pending_data_size = 0
        await super()._process_op_err(e)


async def flush(client: nats.NATS) -> None:
    """Returns once the server has taken all that ``client`` has sent.

    nats-py writes the PING of a flush past the commands that still wait for its flusher; by the
    first PONG the flusher has run, so that the second PING is behind them.
    """
    for _ in range(2):
        await client.flush(timeout=CALL_S)


async def dispose(client: nats.NATS) -> None:
    """Ends a client and its socket. nats-py closes at once where anyone (after an -ERR a task
    that nobody holds) has begun to close, and that waits, perhaps for ever, until the peer
    has taken what is buffered."""
    await within(CALL_S, client.close())
    transport = client._transport
    if transport is None:
        return
    for writer in (transport._io_writer, transport._bare_io_writer):
        if writer is not None:
            writer.transport.abort()
    await asyncio.sleep(0)  # the socket is closed in the next turn of the loop


async def within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Waits so long for a client to close in order, and no longer."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except (TimeoutError, nats.errors.Error, OSError, RuntimeError) as error:  # the last: uvloop's
        log.warning("NATS did not close in order: %s", type(error).__name__)


def reason(error: Exception) -> str:
    """With the setting that is probably wrong, where that can be told."""
    if "Authorization Violation" in str(error):
        return "nats_credentials_file: the server does not take its user and password"
    if isinstance(error, OSError):
        return f"nats_url: {error}"
    return str(error) or "no answer"
