"""The control plane between processes: jobs, accepts, tickets, reports. Never KV, never tokens.

`Bus` is what the rest of Baton knows of NATS; `NatsBus` (common/nats_bus.py) is the real one, and
the simulation runs the same gateway and workers over one with a seeded, lossy transport.

Subjects::

    baton.prefill.any            shared work queue of prefill jobs (JetStream, memory)
    baton.prefill.w.<worker>     a job for a chosen worker (request -> TargetedJobReply)
    baton.prefill.w.<worker>.cancel
    baton.gw.<gateway>.accept    AcceptRequest -> AcceptReply
    baton.gw.<gateway>.ticket    TicketRequest -> TicketReply
    baton.worker.<worker>        WorkerReport, each second and at each change
    baton.discover               asks every worker to report now
    baton.kv.<worker>            KvEvents: what came into and left its prefix cache
    baton.kv.<worker>.snapshot   KvSnapshotRequest -> KvSnapshot
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from common.errors import BatonError

JOB_SUBJECT = "baton.prefill.any"
JOB_STREAM = "BATON_PREFILL"
JOB_CONSUMER = "any"
DISCOVER_SUBJECT = "baton.discover"
REPORT_SUBJECTS = "baton.worker.*"
KV_EVENT_SUBJECTS = "baton.kv.*"
# The largest message, headers included; a setting of nats-server, so all parts must agree on it.
MAX_MESSAGE_BYTES = 8 << 20


def worker_job_subject(worker_id: str) -> str:
    return f"baton.prefill.w.{worker_id}"


def worker_cancel_subject(worker_id: str) -> str:
    return f"baton.prefill.w.{worker_id}.cancel"


def accept_subject(gateway_id: str) -> str:
    return f"baton.gw.{gateway_id}.accept"


def ticket_subject(gateway_id: str) -> str:
    return f"baton.gw.{gateway_id}.ticket"


def report_subject(worker_id: str) -> str:
    return f"baton.worker.{worker_id}"


def kv_events_subject(worker_id: str) -> str:
    return f"baton.kv.{worker_id}"


def kv_snapshot_subject(worker_id: str) -> str:
    return f"baton.kv.{worker_id}.snapshot"


class BusError(BatonError):
    """The control plane did not do it; internal, mapped before anything reaches a client."""


class NoResponders(BusError):
    """Nobody subscribes to the subject of a request."""


class BusTimeout(BusError):
    """No answer in time, or the link is down."""


class QueueFull(BusError):
    """The job queue holds as many jobs as it may."""


class MessageTooLarge(BusError):
    """More than MAX_MESSAGE_BYTES; never sent."""


@dataclass(frozen=True, slots=True)
class Message:
    """One received message; ``reply`` answers it and does nothing where no answer is awaited."""

    subject: str
    data: bytes
    headers: Mapping[str, str]
    reply: Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Job:
    """One delivery from the job queue. Not acked within 2 s, it is delivered again."""

    data: bytes
    headers: Mapping[str, str]
    num_delivered: int
    ack: Callable[[], Awaitable[None]]
    # Gives it back at once, for another worker.
    nak: Callable[[], Awaitable[None]]


Handler = Callable[[Message], Awaitable[None]]


class Bus(Protocol):
    """Times are of the running event loop's clock."""

    @property
    def connected(self) -> bool: ...

    @property
    def connected_for_s(self) -> float:
        """Seconds the link has been up without a break; 0 while it is down."""
        ...

    async def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Fire and forget. Raises BusTimeout when the link is down, MessageTooLarge."""
        ...

    async def request(
        self,
        subject: str,
        data: bytes,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Raises NoResponders, BusTimeout or MessageTooLarge."""
        ...

    async def subscribe(self, subject: str, handler: Handler) -> None:
        """Calls ``handler`` in a task of its own for each message (many at a time) until close.
        Survives reconnects. An exception of a handler is logged, never lost silently."""
        ...

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None: ...

    async def ensure_job_queue(self, max_age_s: float) -> None:
        """Creates the work queue and its consumer where missing. Called by gateways, at start and
        on each reconnect."""
        ...

    async def publish_job(
        self, data: bytes, message_id: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Raises QueueFull, BusTimeout or MessageTooLarge. After a BusTimeout the job may or may
        not be in the queue."""
        ...

    async def fetch_job(self, timeout_s: float) -> Job | None:
        """The next job, or None when none came in time (or the queue is not there yet)."""
        ...

    async def close(self) -> None: ...
