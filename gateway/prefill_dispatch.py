"""Jobs for the prefill pool: published, asked for, owned, answered.

1. `prefill` waits at a gate: published but unaccepted jobs never outnumber the live prefill
   workers, so the backlog stays with the gateway, in its own order.
2. The job goes to a chosen worker (gateway/router.py), or to the next best where that one is busy
   or silent, or to the shared queue. Publishing is no ownership.
3. A worker asks for the attempt (`accept`); the first asker gets it, once. From then on the worker
   owns it: its death, or two reports without it, ends the attempt.
4. The worker answers with a ticket: the first token and the offer of the prompt's blocks. A ticket
   of anyone but the owner of the current attempt is told to release.
5. A job that nobody asked for is given up when for 2 s NATS was up and a worker had a free slot:
   the next attempt publishes it again under its own number.
"""

import asyncio
import logging
from collections.abc import Callable

from google.protobuf.message import DecodeError

from common import bus as bus_names
from common.bus import (
    Bus,
    BusError,
    Message,
    MessageTooLarge,
    QueueFull,
)
from common.errors import DeadlineExceeded, InvalidRequest
from common.failpoints import DROP, DUP, hit_async
from common.types import Role
from common.wire import worker as wire
from gateway.attempt import Attempt, AttemptLost, Owner
from gateway.fair_gate import FairGate
from gateway.patience import Patience
from gateway.registry import WorkerRegistry
from gateway.router import Router
from gateway.run import Run, Runs
from gateway.sequence_state import sequence_state

log = logging.getLogger(__name__)

TARGETED_TIMEOUT_S = 0.5
UNASKED_S = 2.0
_POLL_S = 0.25
# How long a request waits for NATS, or for a prefill worker to come back, once it has started.
PATIENCE_S = 10.0


class PrefillDispatch:
    """The gateway's side of the prefill protocol. `accept` and `ticket` are free of I/O.
    ``on_accepted`` is told of each run that a worker has taken."""

    def __init__(
        self,
        bus: Bus,
        gateway_id: str,
        runs: Runs,
        registry: WorkerRegistry,
        router: Router,
        on_accepted: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self._bus = bus
        self._gateway_id = gateway_id
        self._runs = runs
        self._registry = registry
        self._router = router
        self._on_accepted = on_accepted
        self._gate = FairGate(width=lambda: len(registry.ready(Role.PREFILL)))
        self.num_malformed = 0
        # Of all prompts whose tickets were taken.
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0

    async def start(self) -> None:
        await self._bus.subscribe(bus_names.accept_subject(self._gateway_id), self._on_accept)
        await self._bus.subscribe(bus_names.ticket_subject(self._gateway_id), self._on_ticket)

    def wake(self) -> None:
        """A prefill worker came."""
        self._gate.wake()

    @property
    def num_unaccepted(self) -> int:
        return self._gate.num_inside

    # ------------------------------------------------------------ one job

    async def prefill(self, run: Run, attempt: Attempt) -> wire.PrefillResult:
        """The ticket's result. Raises AttemptLost, and BatonErrors that end the request."""
        clock = asyncio.get_running_loop().time
        patience = Patience(
            "prefill", lambda: bool(self._registry.ready(Role.PREFILL)), PATIENCE_S, clock
        )

        def go_on() -> None:
            patience.look()
            if attempt.lost is not None:
                raise attempt.lost

        await self._gate.acquire(run, go_on)
        try:
            await self._publish(run, attempt, go_on)
            await self._until_accepted(run, attempt, patience)
        finally:
            self._gate.release()
        self._on_accepted(run)
        while attempt.ticket is None:
            await run.wait_change()
        return self._result(attempt.ticket)

    async def _publish(self, run: Run, attempt: Attempt, look: Callable[[], None]) -> None:
        fault = await hit_async("gateway.before_publish")
        loop = asyncio.get_running_loop()
        job = wire.PrefillJob(
            sequence=sequence_state(run, attempt, loop.time()), gateway_id=self._gateway_id
        ).SerializeToString()
        attempt.published_s = loop.time()
        self._runs.counters.jobs_published += 1
        if fault == DROP:
            return
        while True:
            for worker_id in self._router.targets(run):
                if await self._offered_to(worker_id, job, attempt):
                    return
            if not self._router.avoids_some(run):
                break
            # The shared queue would give it to those, too.
            await asyncio.sleep(_POLL_S)
            look()
        try:
            await self._bus.publish_job(
                job, f"{run.request_id}:{attempt.number}", attempt.trace_context
            )
            if fault == DUP:
                again = f"{run.request_id}:{attempt.number}:again"
                await self._bus.publish_job(job, again, attempt.trace_context)
        except QueueFull:
            raise AttemptLost("queue_full") from None
        except MessageTooLarge:
            raise InvalidRequest("prompt", "has too many tokens for one job message") from None
        except BusError as error:
            log.warning("a job could not be published: %s", error)
            raise AttemptLost("nats_down") from None
        await hit_async("gateway.after_publish")

    async def _offered_to(self, worker_id: str, job: bytes, attempt: Attempt) -> bool:
        """True when the chosen worker said that it will ask for the job."""
        try:
            data = await self._bus.request(
                bus_names.worker_job_subject(worker_id),
                job,
                TARGETED_TIMEOUT_S,
                attempt.trace_context,
            )
            return wire.TargetedJobReply.FromString(data).accepted
        except (BusError, DecodeError):
            return False

    async def _until_accepted(self, run: Run, attempt: Attempt, patience: Patience) -> None:
        loop = asyncio.get_running_loop()
        unasked_s = 0.0
        while attempt.owner is None and attempt.ticket is None:
            before_s = loop.time()
            try:
                async with asyncio.timeout(_POLL_S):
                    await run.wait_change()
            except TimeoutError:
                pass
            waited_s = loop.time() - before_s
            if self._bus.connected and self._registry.any_free_prefill_slot():
                unasked_s += waited_s
            if attempt.owner is None and unasked_s >= UNASKED_S:
                raise AttemptLost("unaccepted")
            patience.look()

    def _result(self, ticket: wire.TicketRequest) -> wire.PrefillResult:
        if ticket.WhichOneof("outcome") == "result":
            return ticket.result
        reason = ticket.failure.reason
        if reason == "too_large":
            raise InvalidRequest("prompt", "is longer than the KV pool of a prefill worker")
        if reason == "message_too_large":
            raise InvalidRequest("prompt_logprobs", "too many for this prompt; ask for fewer")
        if reason == "deadline":
            raise DeadlineExceeded("the request's time was over before its prompt was computed")
        raise AttemptLost(reason or "failed", counts=reason not in ("drained", "cancelled"))

    async def cancel(self, run: Run, attempt: Attempt) -> None:
        """Tells the owner, if there is one, to stop; a lost message costs only its work."""
        self._registry.settled(run.request_id, attempt.number)
        if attempt.owner is None or attempt.ticket is not None:
            return
        if await hit_async("gateway.before_cancel") == DROP:
            return
        message = wire.PrefillCancel(request_id=run.request_id, attempt=attempt.number)
        try:
            await self._bus.publish(
                bus_names.worker_cancel_subject(attempt.owner.worker_id),
                message.SerializeToString(),
            )
        except BusError:
            return

    # ------------------------------------------------------------ what workers ask

    def accept(self, request: wire.AcceptRequest) -> wire.AcceptReply:
        """Grants an attempt once. Idempotent for equal content."""
        run = self._runs.by_id.get(request.request_id)
        if run is None:
            return wire.AcceptReply(reason="unknown")
        attempt = run.current(request.attempt)
        if attempt is None or attempt.lost is not None:
            return wire.AcceptReply(reason="stale_attempt")
        if request.worker_id in self._registry.refused:
            return wire.AcceptReply(reason="incompatible")
        owner = Owner(request.worker_id, request.epoch)
        if attempt.owner is None:
            attempt.owner = owner
            num_tokens = self._router.num_uncached(run, owner.worker_id)
            self._registry.granted(run.request_id, attempt.number, owner.worker_id, num_tokens)
            self._router.sent(run, owner.worker_id)
            attempt.changed.set()
        elif attempt.owner != owner:
            return wire.AcceptReply(reason="owned")
        remaining_ms = run.remaining_ms(asyncio.get_running_loop().time())
        return wire.AcceptReply(granted=True, remaining_ms=remaining_ms)

    def ticket(self, ticket: wire.TicketRequest) -> bool:
        """True when the ticket is taken; else its offer is to be released."""
        found = self._runs.current(ticket.request_id, ticket.attempt)
        if found is None:
            return False
        run, attempt = found
        if attempt.owner != Owner(ticket.worker_id, ticket.epoch) or attempt.lost is not None:
            self._runs.counters.fenced += 1
            return False
        if attempt.ticket is None:
            attempt.ticket = ticket
            self._registry.settled(run.request_id, attempt.number)
            self.num_computed_tokens += ticket.result.computed_tokens
            self.num_cached_tokens += ticket.result.cached_tokens
            attempt.changed.set()
        return True

    def orphaned(self, request_id: str, attempt_number: int) -> None:
        """The registry says that the owner of a granted attempt is gone."""
        run = self._runs.by_id.get(request_id)
        attempt = run.attempt if run is not None else None
        if attempt is None or attempt.number != attempt_number or attempt.ticket is not None:
            return
        self._runs.counters.worker_lost += 1
        attempt.lose(AttemptLost("worker_lost", owner_died=True))

    async def _on_accept(self, message: Message) -> None:
        try:
            request = wire.AcceptRequest.FromString(message.data)
        except DecodeError:
            self.num_malformed += 1
            return
        reply = self.accept(request)
        if await hit_async("gateway.before_accept_reply") != DROP:
            await message.reply(reply.SerializeToString())

    async def _on_ticket(self, message: Message) -> None:
        try:
            ticket = wire.TicketRequest.FromString(message.data)
        except DecodeError:
            self.num_malformed += 1
            return
        taken = self.ticket(ticket)
        if await hit_async("gateway.before_ticket_reply") != DROP:
            await message.reply(wire.TicketReply(taken=taken).SerializeToString())
