"""What every call of common/nats_bus.py to nats-py goes through: limits, time, errors."""

import asyncio
import json
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors

from common.bus import (
    MAX_MESSAGE_BYTES,
    BusError,
    BusTimeout,
    MessageTooLarge,
    NoResponders,
    QueueFull,
)
from common.config import read_secret
from common.errors import ConfigError

CALL_S = 2.0
_STREAM_IS_FULL = 10077
_HEADER_FRAME_BYTES = 16


async def mapped(work: Coroutine[Any, Any, Any], timeout_s: float = CALL_S) -> Any:
    """``work``'s result, within ``timeout_s``, with the client's errors as ours.

    Always ends a cancelled task: the client waits by `asyncio.wait_for`, which up to Python 3.11
    forgets a cancel that comes in the same turn of the loop as the answer.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancels = task.cancelling()
    try:
        return await _mapped(work, timeout_s)
    finally:
        if task.cancelling() > num_cancels:
            raise asyncio.CancelledError


async def _mapped(work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await work
    except nats.errors.NoRespondersError:
        raise NoResponders("nobody listens") from None
    except nats.js.errors.ServiceUnavailableError as error:
        if error.err_code == _STREAM_IS_FULL:
            raise QueueFull("the job queue is full") from None
        raise BusTimeout(f"JetStream does not answer: {error}") from None
    except (TimeoutError, nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError):
        raise BusTimeout("NATS does not answer") from None
    except nats.errors.Error as error:
        raise BusError(f"NATS: {error}") from error


def need_size(data: bytes, headers: Mapping[str, str] | None) -> None:
    """nats-py does not count headers; the server does, and closes the link."""
    num_bytes = len(data) + sum(len(key) + len(value) + 4 for key, value in (headers or {}).items())
    if num_bytes + _HEADER_FRAME_BYTES > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(f"{num_bytes} bytes, at most {MAX_MESSAGE_BYTES}")


def headers_of(headers: Mapping[str, str] | None) -> dict[str, str] | None:
    return dict(headers) if headers else None


def read_credentials(path: Path | None) -> tuple[str | None, str | None]:
    if path is None:
        return None, None
    try:
        content = json.loads(read_secret(path, "nats_credentials_file"))
        return str(content["user"]), str(content["password"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            "nats_credentials_file", f"{path} must hold JSON with user and password"
        ) from None
