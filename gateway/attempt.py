"""One try to have a request run, and why a try can end without an answer."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.types import Epoch, WorkerId
from common.wire import worker as wire

if TYPE_CHECKING:
    from gateway.decode_link import DecodeLink


class AttemptLost(Exception):
    """This attempt gives no answer; the request goes on with the next one.

    ``counts``: raises the failure count (owner death, failed compute, kv_lost), of which a request
    survives few. ``owner_died``: a worker died while it held the request; two of those make it a
    poison request. Drain, never-accepted and streams closed on purpose do neither.
    """

    def __init__(self, reason: str, *, counts: bool = False, owner_died: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.counts = counts or owner_died
        self.owner_died = owner_died


@dataclass(frozen=True, slots=True)
class Owner:
    """The worker that an attempt was granted to."""

    worker_id: WorkerId
    epoch: Epoch


@dataclass(slots=True)
class Attempt:
    """The gateway's record of one attempt: who owns it, what has been heard of it.

    Everything that arrives late is compared with ``number`` (I5). ``owner`` is set by the first
    accept that was granted and never changes. ``changed`` wakes the request's own task.
    """

    number: int
    changed: asyncio.Event
    published: bool = False
    published_s: float = 0.0
    owner: Owner | None = None
    ticket: wire.TicketRequest | None = None
    link: "DecodeLink | None" = None
    decode_started: bool = False
    decode_finished: bool = False
    # The sequence's totals so far, as the decode worker sends them with first and last tokens.
    decode_usage: wire.DecodeUsage | None = None
    lost: AttemptLost | None = None
    trace_context: dict[str, str] = field(default_factory=dict)

    def lose(self, lost: AttemptLost) -> None:
        """The first reason stands."""
        if self.lost is None:
            self.lost = lost
        self.changed.set()
