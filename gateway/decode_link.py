"""The one stream between this gateway and one decode worker.

1. Dial, say hello; the worker answers with its own hello.
2. `reserve` asks for room and returns when it was granted; a promise belongs to the request on this
   stream, and a higher attempt takes it over.
3. `start` turns the promise into a sequence; its tokens come back as `StepTokens`, one message a
   step for all of this gateway's sequences.
4. Heartbeats go both ways. Silence for ``timeout_s``, or the end of the stream, ends the link and
   every attempt on it; sequences on the other side end with the same stream instance.

The reader never awaits a client, the writer never waits for the worker: both only move messages
between the stream and queues.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from common.config import PROTOCOL_VERSION
from common.errors import BatonError
from common.failpoints import DROP, hit_async
from common.logging import about
from common.standstill import late_s
from common.wire import finish_reason_from_proto, logprobs_from_proto
from common.wire import worker as wire
from gateway.attempt import Attempt, AttemptLost
from gateway.registry import HUNG_ENGINE_S
from gateway.run import Arrival, Run, Runs

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5

Dial = Callable[[AsyncIterator[wire.StreamRequest]], AsyncIterator[wire.StreamResponse]]

_REASONS = {
    wire.END_REASON_KV_LOST: "kv_lost",
    wire.END_REASON_FAILED: "failed",
    wire.END_REASON_DRAINED: "drained",
    wire.END_REASON_ABORTED: "aborted",
    wire.END_REASON_DEADLINE: "deadline",
}


class ReserveRefused(Exception):
    """The worker will not have this request; ``reason`` as in worker.proto."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class DecodeLink:
    """Owned by the decode pool, which runs `run` in a task and forgets the link when it returns."""

    worker_id: str
    gateway_id: str
    runs: Runs
    timeout_s: float
    # Called when the link became usable.
    on_connected: Callable[[], None]
    num_blocks: int = 0
    connected: bool = False
    # Set when the link is over: how, in one word.
    closed: str = ""
    promised_blocks: int = 0
    blocks_free: int = 0
    _outgoing: asyncio.Queue[wire.StreamRequest | None] = field(default_factory=asyncio.Queue)
    _reserving: dict[str, tuple[int, asyncio.Future[None]]] = field(default_factory=dict)
    # Blocks reserved or in use by our own requests: what we know before the next heartbeat.
    reserved: dict[str, int] = field(default_factory=dict)
    _heard_s: float = 0.0
    # The end of this stream is the death of an owner, not an end in good order.
    died: bool = False

    # ------------------------------------------------------------ the stream

    async def run(self, dial: Dial) -> None:
        """Until the stream ends, for whatever reason; never raises what the world did wrong."""
        loop = asyncio.get_running_loop()
        self._heard_s = loop.time()
        heartbeat = loop.create_task(self._beat())
        reader = loop.create_task(self._read(dial(self._outgoing_messages())))
        try:
            await asyncio.wait((heartbeat, reader), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (heartbeat, reader):
                task.cancel()
            results = await asyncio.gather(heartbeat, reader, return_exceptions=True)
            self._close()
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, BatonError):
                raise result

    async def _outgoing_messages(self) -> AsyncIterator[wire.StreamRequest]:
        yield wire.StreamRequest(
            hello=wire.StreamHello(peer_id=self.gateway_id, protocol_version=PROTOCOL_VERSION)
        )
        while (message := await self._outgoing.get()) is not None:
            yield message

    async def _read(self, stream: AsyncIterator[wire.StreamResponse]) -> None:
        clock = asyncio.get_running_loop().time
        try:
            async for message in stream:
                self._heard_s = clock()
                self._on_message(message)
        except BatonError:
            self.died = True
            raise

    async def _beat(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            if await hit_async("gateway.before_heartbeat") != DROP:
                self.send(wire.StreamRequest(heartbeat=wire.Heartbeat()))
            # Where we stood still ourselves, what was said meanwhile has not been read yet.
            late = await late_s(HEARTBEAT_S)
            self._heard_s += late
            if clock() - self._heard_s > self.timeout_s:
                self.died = True
                return

    def _close(self) -> None:
        """Ends every attempt that this stream carried. A stream that the worker ended in good
        order is not held against anyone; one that broke is the death of an owner."""
        self.connected = False
        self.closed = "died" if self.died else "ended"
        self._outgoing.put_nowait(None)
        for _, waiter in self._reserving.values():
            if not waiter.done():
                waiter.set_exception(AttemptLost("worker_lost"))
        self._reserving.clear()
        for run in list(self.runs.by_id.values()):
            attempt = run.attempt
            if attempt is None or attempt.link is not self:
                continue
            if self.died and attempt.decode_started:
                attempt.lose(AttemptLost("worker_lost", owner_died=True))
            else:
                attempt.lose(AttemptLost("worker_lost" if self.died else "drained"))

    # ------------------------------------------------------------ what the worker says

    def _on_message(self, message: wire.StreamResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "step_tokens":
            for sequence in message.step_tokens.sequences:
                self._guarded_tokens(sequence)
        elif kind == "granted":
            self._resolve(message.granted.request_id, message.granted.attempt, "")
        elif kind == "refused":
            refused = message.refused
            self._resolve(refused.request_id, refused.attempt, refused.reason or "refused")
        elif kind == "ended":
            self._on_ended(message.ended)
        elif kind == "heartbeat":
            self._on_heartbeat(message.heartbeat)
        elif kind == "hello":
            self.num_blocks = message.hello.num_blocks
            self.blocks_free = self.num_blocks
            self.connected = True
            self.on_connected()

    def _guarded_tokens(self, sequence: wire.SequenceTokens) -> None:
        """A bug, or a message that says nothing we know, ends the attempt that it is of: the
        others of this step go on."""
        try:
            self._on_tokens(sequence)
        except Exception:
            log.exception("tokens from %s", self.worker_id, extra=about(sequence.request_id))
            if found := self.runs.current(sequence.request_id, sequence.attempt):
                found[1].lose(AttemptLost("failed", counts=True))

    def _on_tokens(self, sequence: wire.SequenceTokens) -> None:
        found = self.runs.current(sequence.request_id, sequence.attempt)
        if found is None or found[1].link is not self:
            return
        run, attempt = found
        if sequence.HasField("usage"):
            attempt.decode_usage = sequence.usage
        reason = finish_reason_from_proto(sequence.finish_reason)
        if reason is not None:
            attempt.decode_finished = True
            self.forget(run.request_id)
        run.receive(
            Arrival(
                sequence.index,
                tuple(sequence.token_ids),
                logprobs_from_proto(sequence.logprobs),
                logprobs_from_proto(sequence.prompt_logprobs),
                reason,
                sequence.matched_token_id if sequence.HasField("matched_token_id") else None,
            )
        )

    def _on_ended(self, ended: wire.Ended) -> None:
        found = self.runs.current(ended.request_id, ended.attempt)
        if found is None or found[1].link is not self:
            return
        reason = _REASONS.get(ended.reason, "failed")
        if reason == "kv_lost":
            self.runs.counters.kv_lost += 1
            found[0].excluded_decode.add(self.worker_id)
            if (owner := found[1].owner) is not None:
                found[0].excluded_prefill.add(owner.worker_id)
        found[1].decode_finished = True
        self.forget(ended.request_id)
        found[1].lose(AttemptLost(reason, counts=reason in ("kv_lost", "failed")))

    def _on_heartbeat(self, heartbeat: wire.Heartbeat) -> None:
        self.promised_blocks = heartbeat.promised_blocks
        if heartbeat.HasField("blocks"):
            self.blocks_free = heartbeat.blocks.free + heartbeat.blocks.cached
        if heartbeat.step_age_s > HUNG_ENGINE_S:
            self.died = True
            self._outgoing.put_nowait(None)

    def _resolve(self, request_id: str, attempt: int, refusal: str) -> None:
        number, waiter = self._reserving.get(request_id, (0, None))
        if waiter is None or number != attempt:
            if self.runs.by_id.get(request_id) is None and not refusal:
                # Granted after we lost interest: give it back.
                self.send(_unreserve(request_id, attempt))
            return
        if not waiter.done():
            if refusal:
                waiter.set_exception(ReserveRefused(refusal))
            else:
                waiter.set_result(None)

    # ------------------------------------------------------------ what we say

    def send(self, message: wire.StreamRequest) -> None:
        """Queues a message; does nothing once the link is over."""
        if not self.closed:
            self._outgoing.put_nowait(message)

    async def reserve(self, run: Run, attempt: Attempt, num_blocks: int) -> None:
        """Returns once the worker promised the room. Raises ReserveRefused, or AttemptLost when the
        link ends first. Gives the promise back when cancelled."""
        if self.closed:
            raise AttemptLost("worker_lost")
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._reserving[run.request_id] = (attempt.number, waiter)
        self.reserved[run.request_id] = num_blocks
        reserve = wire.Reserve(
            request_id=run.request_id,
            attempt=attempt.number,
            num_blocks=num_blocks,
            remaining_ms=run.remaining_ms(loop.time()),
        )
        self.send(wire.StreamRequest(reserve=reserve))
        try:
            await waiter
        except BaseException:
            self.unreserve(run.request_id, attempt.number)
            raise
        finally:
            if self._reserving.get(run.request_id) == (attempt.number, waiter):
                del self._reserving[run.request_id]

    def unreserve(self, request_id: str, attempt: int) -> None:
        self.forget(request_id)
        self.send(_unreserve(request_id, attempt))

    def start(self, attempt: Attempt, start: wire.Start) -> None:
        attempt.decode_started = True
        self.send(wire.StreamRequest(start=start))

    def abort(self, request_id: str, attempt: int) -> None:
        self.forget(request_id)
        self.send(wire.StreamRequest(abort=wire.Abort(request_id=request_id, attempt=attempt)))

    def forget(self, request_id: str) -> None:
        """The request holds no room here any more."""
        self.reserved.pop(request_id, None)

    @property
    def headroom(self) -> int:
        """Blocks that may still be promised, as far as this gateway knows: the larger of what
        others hold by the last heartbeat and what it reserved itself."""
        used = max(self.num_blocks - self.blocks_free, 0) + self.promised_blocks
        return self.num_blocks - max(used, sum(self.reserved.values()))

    @property
    def num_reserving(self) -> int:
        return sum(not waiter.done() for _, waiter in self._reserving.values())


def _unreserve(request_id: str, attempt: int) -> wire.StreamRequest:
    return wire.StreamRequest(unreserve=wire.Unreserve(request_id=request_id, attempt=attempt))
