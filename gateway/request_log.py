"""One line in the log for each request that has ended: which, how much, how long, and how. Nothing
of what a client sent is in it."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from common.errors import BatonError, InternalError, Unavailable
from common.logging import about
from gateway.request import Completed

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Record:
    """``num_output_tokens``: given to the client so far, over all choices. ``ends`` has one entry
    for each choice that was answered."""

    request_id: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    ends: list[Completed] = field(default_factory=list)


@contextmanager
def recorded(trace_id: str) -> Iterator[Record]:
    """Around a request; who serves it fills the record in."""
    clock = asyncio.get_running_loop().time
    started_s = clock()
    record = Record()
    level, outcome = logging.WARNING, "InternalError"
    try:
        yield record
        level, outcome = logging.INFO, ", ".join(end.finish_reason.value for end in record.ends)
    except BatonError as error:
        outcome = type(error).__name__
        if not isinstance(error, InternalError | Unavailable):
            level = logging.INFO
        raise
    except (asyncio.CancelledError, GeneratorExit):
        level, outcome = logging.INFO, "cancelled"
        raise
    finally:
        log.log(
            level,
            "request: %d + %d tokens, %.1f ms, %s",
            record.num_prompt_tokens,
            record.num_output_tokens,
            1000 * (clock() - started_s),
            outcome,
            extra=about(record.request_id, trace_id),
        )
