"""The decode worker: promises room, takes handed-off prompts, streams tokens.

The life of a sequence here:

1. *Promised*: its gateway reserved room on its stream (reservations.py).
2. *Started*: Start came with the ticket's offer, or without one (the prompt is computed here). The
   promise becomes a sequence that waits in the engine.
3. *Admitted*: the engine has blocks. Of an offer, those not cached here already are claimed, copied
   and settled (kv_transfer/imports.py); only then does the sequence join the running batch.
4. *Running*: each engine step gives tokens; all that go to one gateway are one message.
5. *Ended*: finished, with its last tokens; or by us (kv_lost, failed, deadline, drained), with
   `Ended`; or by the gateway (abort, end of its stream), with nothing. Blocks under a copy stay
   quarantined until that copy has returned.

Each request has one sequence a stream. A Start or Abort of an older attempt is refused and counted.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import asdict

from common import failpoints
from common.bus import Bus
from common.config import PROTOCOL_VERSION, DecodeSettings
from common.telemetry import Telemetry
from common.types import EngineEvent, StepRecord
from common.wire import block_counts_to_proto
from common.wire import worker as wire
from decode_worker.link import GatewayLink, LinkLimits
from decode_worker.metrics import exposition
from decode_worker.promises import Promises
from decode_worker.reservations import Occupancy, Reservations, StreamId
from decode_worker.running import Running
from decode_worker.statistics import DecodeStatistics
from engine.engine import Engine
from kv_transfer.imports import Imports
from worker.drain import Phase
from worker.introspection import Json, to_json
from worker.kv_events import KvEventPublisher
from worker.metrics import StepMeter
from worker.rates import PrefillRates
from worker.registration import Registration
from worker.report import WorkerFacts, WorkerState, make_load, make_report
from worker.runtime import MakeRuntime
from worker.snapshot import EngineSnapshot

log = logging.getLogger(__name__)


class DecodeWorker:
    """Everything but the process around it; made and used inside the running event loop."""

    def __init__(
        self,
        facts: WorkerFacts,
        settings: DecodeSettings,
        bus: Bus,
        imports: Imports,
        make_runtime: MakeRuntime,
        telemetry: Telemetry,
    ) -> None:
        self._facts = facts
        self._limits = LinkLimits(settings.outbox_max_bytes, settings.outbox_timeout_s)
        self._imports = imports
        self._meter = StepMeter(facts.costs)
        self._runtime = make_runtime(self._on_events)
        self._snapshot = EngineSnapshot(self._runtime, self._refreshed)
        self._kv_events = KvEventPublisher(bus, facts.identity, self._runtime)
        self._prefill_rates = PrefillRates(facts.step_tokens)
        self._registration = Registration(bus, facts.identity.worker_id, self.describe)
        self._promises = Promises(
            Reservations(facts.num_blocks, settings.decode_lookahead), self._send, self._occupancy
        )
        self._running = Running(
            settings.local_prefill,
            self._runtime,
            self._snapshot,
            self._promises,
            imports,
            telemetry,
            facts.costs,
            self._changed,
        )
        self._links: dict[StreamId, GatewayLink] = {}
        self._stream_ids = itertools.count(1)
        self._state = WorkerState.STARTING
        self._idle = asyncio.Event()

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        await self._runtime.start()
        await self._snapshot.start()
        await self._imports.start()
        self._state = WorkerState.READY

    async def run(self) -> None:
        """Reports, and takes back promises that ran out, until cancelled. Streams run in `stream`,
        on the tasks of their callers."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._snapshot.run(), name="snapshot")
            group.create_task(self._promises.run(), name="promises")
            group.create_task(self._registration.run(), name="registration")
            group.create_task(self._kv_events.run(), name="kv events")

    async def stop_intake(self) -> None:
        """No new promises; those given stay good."""
        self._state = WorkerState.DRAINING
        self._promises.drain()
        self._changed()
        await self._registration.report()

    async def finish(self) -> None:
        await self._idle.wait()

    async def hand_over(self) -> None:
        """Whatever still runs goes on elsewhere; then the streams end in good order."""
        self._running.hand_over_all()
        links = list(self._links.values())
        await asyncio.gather(*(link.flush() for link in links))
        for link in links:
            link.close("drained")
        await self._running.wait_returned()

    async def leave(self) -> None:
        self._state = WorkerState.GONE
        await self._registration.report()

    async def stop(self) -> None:
        """Ends what still runs. The bus, the pool and telemetry stay the caller's."""
        for link in list(self._links.values()):
            link.close("stopped")
        await self._running.cancel()
        await self._imports.close()
        await self._runtime.stop()

    def drain_phases(self) -> list[Phase]:
        return [
            Phase("stop intake", self.stop_intake),
            Phase("finish", self.finish, until=0.8),
            Phase("hand over", self.hand_over, until=0.95),
            Phase("leave", self.leave),
        ]

    # ------------------------------------------------------------ what others see

    def is_ready(self) -> bool:
        return self._state is WorkerState.READY

    def describe(self) -> wire.WorkerReport:
        imports = self._imports.statistics()
        load = make_load(
            self._snapshot.current,
            self._runtime.step_age_s(),
            owned=((spec.request_id, spec.attempt) for spec in self._running.specs()),
            bytes_moved=imports.num_bytes,
            kv_links={worker_id: choice.reason for worker_id, choice in imports.links.items()},
            kv_events=self._kv_events.number,
            promised_blocks=self._promises.num_blocks,
            queued_tokens=self._running.num_queued_tokens,
            prefill_tokens_per_s=self._prefill_rates.per_s,
            full_step_tokens_per_s=self._prefill_rates.full_per_s,
            transfer_bytes_per_s=self._running.transfer_rate.per_s,
        )
        return make_report(self._facts, self._state, load)

    def statistics(self) -> DecodeStatistics:
        return DecodeStatistics(
            state=self._state,
            streams=len(self._links),
            outbox_bytes=sum(link.outbox_bytes for link in self._links.values()),
            sequences=len(self._running),
            reservations=self._promises.statistics(),
            engine=self._snapshot.current,
            imports=self._imports.statistics(),
            **asdict(self._running.counters),
        )

    def metrics(self) -> str:
        return exposition(self._facts, self.statistics(), self._meter)

    def debug_statistics(self) -> Json:
        return to_json(self.statistics())

    def debug_steps(self) -> Json:
        return to_json(list(self._snapshot.steps))

    async def debug_kv(self) -> Json:
        """The ledger, and who its owners are."""
        ledger = await self._runtime.call(Engine.ledger)
        return {
            "ledger": to_json(ledger),
            "sequences": {
                str(spec.seq_id): {"request_id": spec.request_id, "attempt": spec.attempt}
                for spec in self._running.specs()
            },
            "promised_blocks": self._promises.num_blocks,
        }

    def _heartbeat(self) -> wire.Heartbeat:
        return wire.Heartbeat(
            step_age_s=self._runtime.step_age_s(),
            promised_blocks=self._promises.num_blocks,
            blocks=block_counts_to_proto(self._snapshot.current.blocks),
        )

    # ------------------------------------------------------------ streams

    def stream(
        self, requests: AsyncIterator[wire.StreamRequest]
    ) -> AsyncGenerator[wire.StreamResponse, None]:
        """One instance of DecodeService.Stream. To be closed by whoever stops reading it."""
        link = GatewayLink(
            StreamId(next(self._stream_ids)),
            self,
            self._limits,
            wire.StreamHello(
                peer_id=self._facts.identity.worker_id,
                epoch=self._facts.identity.epoch,
                protocol_version=PROTOCOL_VERSION,
                num_blocks=self._facts.num_blocks,
            ),
            self._heartbeat,
        )
        self._links[link.stream] = link
        return link.responses(requests)

    async def on_message(self, link: GatewayLink, message: wire.StreamRequest) -> None:
        """A bug in what is done for one message ends what that one is about; the stream goes on."""
        try:
            await self._obey(link, message)
        except Exception:
            log.exception("a bug in what is done for a message of %s", link.gateway_id)
            self._give_up(link, message)

    async def _obey(self, link: GatewayLink, message: wire.StreamRequest) -> None:
        match message.WhichOneof("message"):
            case "reserve":
                await failpoints.hit_async("decode.before_grant")
                self._promises.reserve(link.stream, message.reserve)
            case "unreserve":
                request = message.unreserve
                self._promises.unreserve(link.stream, request.request_id, request.attempt)
            case "start":
                await failpoints.hit_async("decode.after_start")
                self._running.start(link, message.start)
            case "abort":
                self._running.abort(link, message.abort)
        self._changed()

    def _give_up(self, link: GatewayLink, message: wire.StreamRequest) -> None:
        """However far it came. An answer is owed to these two alone."""
        match message.WhichOneof("message"):
            case "reserve":
                self._promises.refuse(link.stream, message.reserve)
            case "start":
                self._running.give_up_start(link, message.start)
        self._changed()

    def on_closed(self, link: GatewayLink) -> None:
        del self._links[link.stream]
        self._promises.drop_stream(link.stream)
        self._running.end_stream(link.stream)
        self._changed()

    def _changed(self) -> None:
        """A sequence, a promise or a stream has come or gone."""
        self._room_changed()
        self._registration.changed()

    def _refreshed(self) -> None:
        self._room_changed()
        self._kv_events.changed()

    def _room_changed(self) -> None:
        self._promises.grant()
        if self._running or not self._promises.is_empty:
            self._idle.clear()
        else:
            self._idle.set()

    def _occupancy(self) -> Occupancy:
        engine = self._snapshot.current
        return Occupancy.of(engine.blocks, engine.num_running)

    def _send(self, stream: StreamId, message: wire.StreamResponse) -> None:
        if (link := self._links.get(stream)) is not None:
            link.send(message)

    def _on_events(self, events: Sequence[EngineEvent], record: StepRecord | None) -> None:
        self._running.on_events(events, record)
        if record is not None:
            self._measure(record)

    def _measure(self, record: StepRecord) -> None:
        try:
            self._meter.add(record)
            self._prefill_rates.add(record)
        except Exception:
            log.exception("a bug in the figures of a step")
