"""One gateway's parts put together, over whatever bus, dialler and offer client it is given.

The process (gateway/app.py) gives it NATS and gRPC, the simulation a lossy imitation of both under
a virtual clock; nothing in here can tell.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from common.bus import DISCOVER_SUBJECT, REPORT_SUBJECTS, Bus, BusError, Message
from common.config import GatewaySettings
from common.standstill import late_s
from common.telemetry import Telemetry
from common.types import Role
from common.wire import worker as wire
from gateway.admission import Admission, Bounds
from gateway.attempt import AttemptLost
from gateway.cache_follower import CacheFollower
from gateway.decode_link import Dial
from gateway.decode_pool import DecodePool
from gateway.local_prefill import LocalPrefillRule
from gateway.offers import OfferClient, OfferKeeper
from gateway.parser import RequestParser
from gateway.pipeline import Pipeline
from gateway.prefill_dispatch import PrefillDispatch
from gateway.prefix_index import IndexStatistics, PrefixIndex
from gateway.registry import Expected, WorkerEntry, WorkerRegistry
from gateway.router import Router
from gateway.run import Counters, Runs
from gateway.tokenizer import IdTokenizer

log = logging.getLogger(__name__)

_TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class GatewayStatistics:
    """A snapshot; metrics read it."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_unaccepted_jobs: int
    num_prefill_workers: int
    num_decode_workers: int
    num_decode_links: int
    num_refused_workers: int
    # Requests in turn for a decode worker's promise of room.
    num_waiting_for_room: int
    num_admission_refusals: int
    admission_refusals: dict[str, int]
    # By reason: where prompts were computed, and why there.
    prefill_decisions: dict[str, int]
    prefix_index: IndexStatistics
    counters: Counters


class Gateway:
    """`start`, then `pipeline.generate` for each request, then `close`."""

    def __init__(
        self,
        settings: GatewaySettings,
        bus: Bus,
        dialer: Callable[[WorkerEntry], Dial],
        offer_client: OfferClient,
        tokenizer: IdTokenizer,
        telemetry: Telemetry,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.bus = bus
        self.runs = Runs()
        entry = tokenizer.entry
        self.registry = WorkerRegistry(
            settings.worker_timeout_s,
            clock,
            on_join=self._on_join,
            on_leave=self._on_leave,
            on_orphan=self._on_orphan,
            on_report=lambda report: self.caches.report(report),
            on_forgotten=self._on_forgotten,
            expected=Expected(entry.fingerprint, entry.vocab_size) if entry else None,
        )
        self.prefix_index = PrefixIndex()
        self.caches = CacheFollower(bus, self.prefix_index)
        router = Router(
            settings.routing, self.registry, self.prefix_index, seed=settings.gateway_id
        )
        self.local_prefill = LocalPrefillRule(
            self.registry, router, settings.local_prefill_threshold
        )
        self.decode = DecodePool(
            settings.gateway_id,
            self.runs,
            self.registry,
            router,
            settings.worker_timeout_s,
            dialer,
            self._on_room,
        )
        self.admission = Admission(
            Bounds(
                settings.max_queued_requests,
                settings.max_queued_tokens,
                settings.max_queued_requests_per_tenant,
                settings.max_queued_tokens_per_tenant,
            ),
            width=lambda: sum(link.connected for link in self.decode.links.values()),
            tokens_per_s=self._prompt_tokens_per_s,
        )
        self.prefill = PrefillDispatch(
            bus, settings.gateway_id, self.runs, self.registry, router, self.admission.leave
        )
        self.offers = OfferKeeper(offer_client)
        self._offer_client = offer_client
        self._endpoints: dict[str, str] = {}
        self.parser = RequestParser(settings, self.registry, tokenizer)
        self.pipeline = Pipeline(
            settings,
            self.runs,
            self.registry,
            self.admission,
            self.decode,
            self.prefill,
            self.local_prefill,
            self.offers,
            tokenizer,
            telemetry,
        )
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.bus.subscribe(REPORT_SUBJECTS, self._on_report)
        await self.prefill.start()
        await self.caches.start()
        self.bus.on_reconnect(self._on_connected)
        await self._on_connected()
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await self.caches.close()
        await self.offers.close()
        await self.decode.close()

    @property
    def ready(self) -> bool:
        """A request would be taken now and, as far as is known, served."""
        return not self.not_ready_because

    @property
    def not_ready_because(self) -> str:
        """What is missing, for an operator; empty while it is ready."""
        if self.pipeline.draining:
            return "it is draining"
        if not self.bus.connected:
            return "the link to NATS is down"
        links = [link for link in self.decode.links.values() if link.connected]
        if not links:
            return "no decode worker is connected"
        if not self.registry.ready(Role.PREFILL) and not any(map(self.decode.is_local, links)):
            return "there is no prefill worker, and no decode worker computes prompts itself"
        return ""

    def ready_workers(self) -> list[str]:
        """Ids of the workers that it would give work to."""
        return [e.worker_id for role in Role for e in self.registry.ready(role)]

    def statistics(self) -> GatewayStatistics:
        return GatewayStatistics(
            num_running=len(self.runs.by_id),
            num_waiting=self.admission.num_waiting,
            num_waiting_tokens=self.admission.num_tokens,
            num_unaccepted_jobs=self.prefill.num_unaccepted,
            num_prefill_workers=len(self.registry.ready(Role.PREFILL)),
            num_decode_workers=len(self.registry.ready(Role.DECODE)),
            num_decode_links=sum(link.connected for link in self.decode.links.values()),
            num_refused_workers=len(self.registry.refused),
            num_waiting_for_room=self.admission.gate.num_waiting + self.admission.gate.num_inside,
            num_admission_refusals=self.admission.num_refused,
            admission_refusals=dict(self.admission.refusals),
            prefill_decisions=dict(self.local_prefill.counts),
            prefix_index=self.prefix_index.statistics(),
            counters=self.runs.counters,
        )

    def _prompt_tokens_per_s(self) -> float:
        """Of all workers that compute prompts, in full steps, cached tokens counted as computed;
        0: unknown, which it is until a queue of prompts has filled a step."""
        measured = sum(
            entry.report.load.full_step_tokens_per_s
            for entry in self.registry.entries.values()
            if entry.report.role == Role.PREFILL or entry.computes_all_prompts
        )
        computed, cached = self.prefill.num_computed_tokens, self.prefill.num_cached_tokens
        return measured * (computed + cached) / computed if computed else measured

    # ------------------------------------------------------------ registry

    async def _on_report(self, message: Message) -> None:
        try:
            report = wire.WorkerReport.FromString(message.data)
        except DecodeError:
            return
        self.registry.report(report)
        self.prefill.wake()

    def _on_join(self, entry: WorkerEntry) -> None:
        log.info("worker %s is there", entry.worker_id)
        self._endpoints[entry.worker_id] = entry.report.endpoint
        if entry.report.role == Role.DECODE:
            self.decode.join(entry)

    def _on_leave(self, worker_id: str, died: bool) -> None:
        log.warning("worker %s is gone: it said so, or said nothing for too long", worker_id)
        self.decode.leave(worker_id, died)
        self.caches.leave(worker_id)
        del self._endpoints[worker_id]

    def _on_orphan(self, request_id: str, attempt: int) -> None:
        self.prefill.orphaned(request_id, attempt)

    def _on_forgotten(self, request_id: str, attempt: int) -> None:
        """No message says how it ended, or that it goes on: nobody would wait for anything."""
        found = self.runs.current(request_id, attempt)
        if found is not None:
            self.runs.counters.worker_lost += 1
            found[1].lose(AttemptLost("forgotten", counts=True))

    def _on_room(self) -> None:
        self.admission.gate.wake()

    async def _on_connected(self) -> None:
        """NATS is there, or there again: its streams may be gone, and so may be any report."""
        self.registry.resume()
        self.caches.reconnected()
        try:
            await self.bus.ensure_job_queue(self.settings.request_timeout_s)
            await self.bus.publish(DISCOVER_SUBJECT, b"")
        except BusError:
            return

    async def _tick(self) -> None:
        while True:
            self.registry.excuse(await late_s(_TICK_S))
            try:
                if self.bus.connected:
                    self.registry.resume()
                else:
                    self.registry.pause()
                self.registry.expire(self.decode.alive)
                self._offer_client.keep(set(self._endpoints.values()))
            except Exception:
                log.exception("a bug while looking who is silent")
