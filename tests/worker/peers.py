"""Whom a worker talks to, by real messages: a gateway's two ends, and an exporter."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence

from common.bus import Bus, Message, accept_subject, ticket_subject
from common.config import PROTOCOL_VERSION
from common.types import (
    SequenceId,
    SequenceOutput,
    SequenceSpec,
)
from common.wire import offer_to_proto
from common.wire import worker as wire
from decode_worker.worker import DecodeWorker
from kv_transfer.exports import Exports
from tests.worker.rig import Side, params, until

# ---------------------------------------------------------------- a gateway for prefill workers


class FakeGateway:
    """Grants and takes everything, unless told otherwise. Speaks the real messages."""

    def __init__(self, bus: Bus, gateway_id: str = "gw-1") -> None:
        self.gateway_id = gateway_id
        self.bus = bus
        self.accepts: list[wire.AcceptRequest] = []
        self.tickets: list[wire.TicketRequest] = []
        self.grant = True
        self.take = True
        self.remaining_ms = 60_000
        # Requests of these kinds that are left without an answer.
        self.mute_accepts = 0
        self.mute_tickets = 0

    async def start(self) -> None:
        await self.bus.subscribe(accept_subject(self.gateway_id), self._accept)
        await self.bus.subscribe(ticket_subject(self.gateway_id), self._ticket)

    async def _accept(self, message: Message) -> None:
        self.accepts.append(wire.AcceptRequest.FromString(message.data))
        if self.mute_accepts:
            self.mute_accepts -= 1
            return
        reply = wire.AcceptReply(granted=self.grant, remaining_ms=self.remaining_ms)
        await message.reply(reply.SerializeToString())

    async def _ticket(self, message: Message) -> None:
        self.tickets.append(wire.TicketRequest.FromString(message.data))
        if self.mute_tickets:
            self.mute_tickets -= 1
            return
        await message.reply(wire.TicketReply(taken=self.take).SerializeToString())

    def job(self, state: wire.SequenceState) -> bytes:
        return wire.PrefillJob(sequence=state, gateway_id=self.gateway_id).SerializeToString()

    async def publish(self, state: wire.SequenceState) -> None:
        await self.bus.publish_job(self.job(state), secrets.token_hex(8))

    async def ticket(self, request_id: str, attempt: int = 1) -> wire.TicketRequest:
        def found() -> list[wire.TicketRequest]:
            return [t for t in self.tickets if (t.request_id, t.attempt) == (request_id, attempt)]

        await until(lambda: bool(found()))
        return found()[0]


# ---------------------------------------------------------------- an exporter for decode workers


class Exporter:
    """The prefill side of a decode test: computes a prompt and offers it, with no gateway."""

    def __init__(self, side: Side, exports: Exports) -> None:
        self.side = side
        self.exports = exports
        self._loop = side.make_runtime(self._on_events)
        self._waiting: dict[int, asyncio.Future[SequenceOutput]] = {}
        self._num = 0

    async def start(self) -> None:
        await self._loop.start()
        await self.exports.start()

    async def stop(self) -> None:
        await self.exports.close()
        await self._loop.stop()

    async def prefill(self, state: wire.SequenceState) -> tuple[int, wire.Offer]:
        """First token and offer of a request."""
        self._num += 1
        seq_id = SequenceId(self._num)
        spec = SequenceSpec(
            seq_id=seq_id,
            request_id=state.request_id,
            attempt=state.attempt,
            prompt_ids=tuple(state.prompt_ids),
            output_ids=tuple(state.output_ids),
            params=params(state.sampling.max_tokens),
            prefill_only=True,
        )
        waiting = self._waiting[seq_id] = asyncio.get_running_loop().create_future()
        self._loop.post(lambda engine: engine.add(spec))
        output = await waiting
        offer = await self.exports.offer(
            output.held,
            spec.num_tokens,
            spec.attempt,
            lambda _: self._loop.post(lambda engine: engine.release_lease(seq_id)),
        )
        return output.token_ids[0], offer_to_proto(offer)

    def _on_events(self, events: Sequence[object], _: object) -> None:
        for event in events:
            assert isinstance(event, SequenceOutput)
            self._waiting.pop(event.seq_id).set_result(event)


# ---------------------------------------------------------------- a gateway's end of a stream


class Stream:
    """Drives DecodeWorker.stream with real messages."""

    def __init__(self, worker: DecodeWorker, gateway_id: str = "gw-1") -> None:
        self.received: list[wire.StreamResponse] = []
        self.ended = False
        self._outgoing: asyncio.Queue[wire.StreamRequest | None] = asyncio.Queue()
        self._responses = worker.stream(self._requests())
        self.send(
            wire.StreamRequest(
                hello=wire.StreamHello(peer_id=gateway_id, protocol_version=PROTOCOL_VERSION)
            )
        )
        self._reader = asyncio.ensure_future(self._read())
        self.beat = True
        self._beating = asyncio.ensure_future(self._beat())

    async def close(self) -> None:
        """As a gateway that goes away."""
        self._beating.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, self._beating, return_exceptions=True)
        await self._responses.aclose()

    def send(self, message: wire.StreamRequest) -> None:
        self._outgoing.put_nowait(message)

    def reserve(self, request_id: str, attempt: int, num_blocks: int, ms: int = 60_000) -> None:
        self.send(
            wire.StreamRequest(
                reserve=wire.Reserve(
                    request_id=request_id,
                    attempt=attempt,
                    num_blocks=num_blocks,
                    remaining_ms=ms,
                )
            )
        )

    def start(self, state: wire.SequenceState, offer: wire.Offer | None = None) -> None:
        self.send(wire.StreamRequest(start=wire.Start(sequence=state, offer=offer)))

    def abort(self, request_id: str, attempt: int = 1) -> None:
        self.send(wire.StreamRequest(abort=wire.Abort(request_id=request_id, attempt=attempt)))

    def of_kind(self, kind: str) -> list[wire.StreamResponse]:
        return [m for m in self.received if m.WhichOneof("message") == kind]

    async def granted(self, request_id: str, attempt: int = 1) -> None:
        def is_there() -> bool:
            names = [(m.granted.request_id, m.granted.attempt) for m in self.of_kind("granted")]
            return (request_id, attempt) in names

        await until(is_there)

    async def end_of(self, request_id: str, attempt: int = 1) -> wire.Ended:
        def found() -> list[wire.Ended]:
            ended = [m.ended for m in self.of_kind("ended")]
            return [e for e in ended if (e.request_id, e.attempt) == (request_id, attempt)]

        await until(lambda: bool(found()))
        return found()[0]

    def tokens(self, request_id: str, attempt: int = 1) -> list[wire.SequenceTokens]:
        return [
            tokens
            for message in self.of_kind("step_tokens")
            for tokens in message.step_tokens.sequences
            if (tokens.request_id, tokens.attempt) == (request_id, attempt)
        ]

    def ids(self, request_id: str, attempt: int = 1) -> list[int]:
        """Checks that the indices follow on each other."""
        ids: list[int] = []
        found = self.tokens(request_id, attempt)
        for tokens in found:
            assert tokens.index == found[0].index + len(ids)
            ids.extend(tokens.token_ids)
        return ids

    async def finished(self, request_id: str, attempt: int = 1) -> list[int]:
        def is_over() -> bool:
            tokens = self.tokens(request_id, attempt)
            return bool(tokens) and tokens[-1].finish_reason != 0

        await until(is_over)
        return self.ids(request_id, attempt)

    async def _requests(self) -> AsyncIterator[wire.StreamRequest]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    async def _read(self) -> None:
        async for message in self._responses:
            self.received.append(message)
        self.ended = True

    async def _beat(self) -> None:
        while True:
            if self.beat:
                self.send(wire.StreamRequest(heartbeat=wire.Heartbeat()))
            await asyncio.sleep(0.3)
