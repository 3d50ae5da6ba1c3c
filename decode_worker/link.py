"""One instance of the stream between a gateway and this worker.

1. Both say hello; a gateway that speaks another protocol is left.
2. The reader hands every message to the worker; the writer empties the outbox. Neither awaits the
   other, and nothing that serves several gateways awaits either.
3. Heartbeats go out every 0.5 s, with the age of the engine's last step.
4. It ends when the gateway ends it, has been silent for `SILENCE_S`, or does not take what is
   written (outbox undrained for too long, or too large). Whichever it is, `close` tells the worker
   once, which then aborts exactly the sequences and promises of this stream.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from common import failpoints
from common.config import PROTOCOL_VERSION
from common.errors import BatonError
from common.wire import worker as wire
from decode_worker.outbox import Outbox
from decode_worker.reservations import StreamId

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
SILENCE_S = 3.0


@dataclass(frozen=True, slots=True)
class LinkLimits:
    outbox_max_bytes: int
    outbox_timeout_s: float


class LinkOwner(Protocol):
    """Implemented by `DecodeWorker`."""

    async def on_message(self, link: "GatewayLink", message: wire.StreamRequest) -> None: ...

    def on_closed(self, link: "GatewayLink") -> None: ...


class GatewayLink:
    def __init__(
        self,
        stream: StreamId,
        owner: LinkOwner,
        limits: LinkLimits,
        hello: wire.StreamHello,
        heartbeat: Callable[[], wire.Heartbeat],
    ) -> None:
        self.stream = stream
        self.gateway_id = ""
        self._owner = owner
        self._limits = limits
        self._heartbeat = heartbeat
        self._outbox = Outbox()
        self._outbox.put(wire.StreamResponse(hello=hello))
        self._clock = asyncio.get_running_loop().time
        self._heard_s = self._clock()
        self._closed = False

    @property
    def outbox_bytes(self) -> int:
        return self._outbox.num_bytes

    def send(self, message: wire.StreamResponse, step_end_s: float | None = None) -> None:
        self._outbox.put(message, step_end_s)
        if self._outbox.num_bytes > self._limits.outbox_max_bytes:
            self.close("outbox too large")

    def close(self, reason: str) -> None:
        """Idempotent; from now on nothing is sent, and `responses` ends."""
        if self._closed:
            return
        self._closed = True
        log.info("stream %d of %s ends: %s", self.stream, self.gateway_id or "a gateway", reason)
        self._outbox.close()
        self._owner.on_closed(self)

    async def flush(self) -> None:
        """Until everything sent so far is on its way, or the link is closed."""
        await self._outbox.wait_empty()

    async def responses(
        self, requests: AsyncIterator[wire.StreamRequest]
    ) -> AsyncGenerator[wire.StreamResponse, None]:
        """Runs the link; what it yields goes to the gateway."""
        loop = asyncio.get_running_loop()
        tasks = (
            loop.create_task(self._read(requests), name=f"stream {self.stream} reader"),
            loop.create_task(self._tick(), name=f"stream {self.stream} ticker"),
        )
        try:
            while (message := await self._outbox.get()) is not None:
                yield message
                if message.HasField("step_tokens"):
                    await failpoints.hit_async("decode.after_send")
        finally:
            self.close("left by the gateway")
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, BatonError):
                    log.warning("stream %d of %s: %s", self.stream, self.gateway_id, result)
                elif isinstance(result, Exception):
                    log.error("stream %d of %s", self.stream, self.gateway_id, exc_info=result)

    async def _read(self, requests: AsyncIterator[wire.StreamRequest]) -> None:
        try:
            async for message in requests:
                if self._closed:
                    return
                self._heard_s = self._clock()
                if message.HasField("hello"):
                    self._greeted(message.hello)
                elif not self.gateway_id:
                    self.close("no hello")
                elif not message.HasField("heartbeat"):
                    await self._owner.on_message(self, message)
        finally:
            self.close("ended by the gateway")

    def _greeted(self, hello: wire.StreamHello) -> None:
        self.gateway_id = hello.peer_id
        if hello.protocol_version != PROTOCOL_VERSION:
            self.close(f"protocol {hello.protocol_version}, this is {PROTOCOL_VERSION}")

    async def _tick(self) -> None:
        while not self._closed:
            if await failpoints.hit_async("decode.before_heartbeat") != failpoints.DROP:
                self.send(wire.StreamResponse(heartbeat=self._heartbeat()))
            await asyncio.sleep(HEARTBEAT_S)
            if self._clock() - self._heard_s > SILENCE_S:
                self.close("silent")
            elif self._outbox.age_s >= self._limits.outbox_timeout_s:
                self.close("outbox not drained")
