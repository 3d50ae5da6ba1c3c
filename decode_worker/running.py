"""The sequences of a decode worker from Start to their end; see decode_worker/worker.py for the
life of one. Runs on the event loop; what it tells the engine is posted, in order.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from common.errors import TransferError
from common.telemetry import Telemetry, carrier_from
from common.types import (
    ChunkRecord,
    EngineEvent,
    ImportReady,
    LocalPrefill,
    Offer,
    RequestId,
    SequenceFailed,
    SequenceId,
    SequenceOutput,
    SequenceSpec,
    StepRecord,
)
from common.wire import offer_from_proto
from common.wire import worker as wire
from decode_worker.link import GatewayLink
from decode_worker.promises import Promises
from decode_worker.reservations import StreamId
from decode_worker.sequences import DecodeSequence, SequenceTable
from decode_worker.spans import SequenceSpans
from decode_worker.statistics import Counters
from decode_worker.tokens import StepMessages
from engine.engine import Engine
from engine.flops import ModelCosts
from engine.loop import EngineRuntime
from kv_transfer.imports import Imports
from worker.rates import Rate
from worker.sequences import SequenceIds, spec_from_state
from worker.snapshot import EngineSnapshot
from worker.spans import StepSpans
from worker.tasks import Tasks

log = logging.getLogger(__name__)


class Running:
    """``changed`` is called when a sequence has come or gone."""

    def __init__(
        self,
        local_prefill: LocalPrefill,
        runtime: EngineRuntime,
        snapshot: EngineSnapshot,
        promises: Promises,
        imports: Imports,
        telemetry: Telemetry,
        costs: ModelCosts,
        changed: Callable[[], None],
    ) -> None:
        self.counters = Counters()
        self._local_prefill = local_prefill
        self._runtime = runtime
        self._snapshot = snapshot
        self._promises = promises
        self._imports = imports
        self._telemetry = telemetry
        self._changed = changed
        self._table = SequenceTable()
        self._seq_ids = SequenceIds()
        self._steps = StepSpans(telemetry, costs)
        # Fetches and releases of offers.
        self._tasks = Tasks()
        # Bytes per second from claim to settle.
        self.transfer_rate = Rate()

    def __len__(self) -> int:
        return len(self._table)

    def specs(self) -> list[SequenceSpec]:
        return [sequence.spec for sequence in self._table]

    @property
    def num_queued_tokens(self) -> int:
        """Of local prefills that have given no token yet, those to compute."""
        return sum(s.spec.num_tokens for s in self._table if s.is_local and not s.told_usage)

    # ------------------------------------------------------------ what gateways say

    def start(self, link: GatewayLink, start: wire.Start) -> None:
        state = start.sequence
        running = self._table.of_request(link.stream, state.request_id)
        if running is not None and running.spec.attempt >= state.attempt:
            self.counters.fenced += 1
            return
        if running is not None:
            self._end(running, "superseded")
        loop = asyncio.get_running_loop()
        spec = spec_from_state(state, self._seq_ids.new(), loop.time(), prefill_only=False)
        offer = offer_from_proto(start.offer) if start.HasField("offer") else None
        sequence = DecodeSequence(
            link=link,
            spec=spec,
            spans=SequenceSpans(
                self._telemetry,
                self._steps,
                spec,
                carrier_from(state.trace_context),
                is_handed_off=offer is not None,
            ),
            offer=offer,
            is_local=offer is None,
        )
        promised = self._promises.start(link.stream, spec.request_id, spec.attempt)
        refusal = self._refusal(sequence, promised)
        self._table.add(sequence)
        if refusal is not None:
            reason, detail = refusal
            self._tell_ended(sequence, reason, detail)
            self._end(sequence, detail)
            return
        self.counters.started += 1
        sequence.deadline = loop.call_later(state.remaining_ms / 1000, self._too_late, sequence)
        add = Engine.add if offer is None else Engine.add_import
        self._tell(partial(add, spec=spec))

    def give_up_start(self, link: GatewayLink, start: wire.Start) -> None:
        """Its `start` met a bug, anywhere. An offer of no sequence yet is left to its lease."""
        state = start.sequence
        request_id, attempt = state.request_id, state.attempt
        sequence = self._table.of_request(link.stream, request_id)
        if sequence is not None and sequence.spec.attempt == attempt:
            self._give_up(sequence.spec.seq_id)
            return
        self.counters.failed += 1
        link.send(_ended(request_id, attempt, wire.END_REASON_FAILED, "internal"))
        self._promises.unreserve(link.stream, request_id, attempt)
        self._promises.landed(link.stream, request_id, attempt)

    def _refusal(
        self, sequence: DecodeSequence, promised: bool
    ) -> tuple[wire.EndReason, str] | None:
        """Why this sequence cannot start here, if so."""
        offer = sequence.offer
        if not promised:
            return wire.END_REASON_ABORTED, "no_promise"
        if offer is None and self._local_prefill is LocalPrefill.NEVER:
            return wire.END_REASON_FAILED, "no_local_prefill"
        spec = sequence.spec
        if not spec.prompt_ids:
            return wire.END_REASON_FAILED, "no_prompt"
        # The KV of all tokens but the last, which is an output token, is handed over.
        if offer is not None and not (spec.output_ids and offer.num_tokens == spec.num_tokens - 1):
            return wire.END_REASON_KV_LOST, "offer_of_another_length"
        return None

    def abort(self, link: GatewayLink, abort: wire.Abort) -> None:
        sequence = self._table.of_request(link.stream, abort.request_id)
        if sequence is None:
            self._promises.unreserve(link.stream, abort.request_id, abort.attempt)
        elif sequence.spec.attempt > abort.attempt:
            self.counters.fenced += 1
        else:
            self._end(sequence, "aborted")

    def end_stream(self, stream: StreamId) -> None:
        for sequence in self._table.of_stream(stream):
            self._end(sequence, "stream_ended")

    def hand_over_all(self) -> None:
        """The gateways have all of them go on elsewhere."""
        for sequence in self._table:
            self._tell_ended(sequence, wire.END_REASON_DRAINED)
            self._end(sequence, "drained")

    async def wait_returned(self) -> None:
        """Until no copy is under way and no offer is still to be released."""
        await self._tasks.wait_idle()

    async def cancel(self) -> None:
        await self._tasks.cancel()

    # ------------------------------------------------------------ how a sequence ends

    def _too_late(self, sequence: DecodeSequence) -> None:
        self._tell_ended(sequence, wire.END_REASON_DEADLINE)
        self._end(sequence, "deadline")

    def _tell_ended(
        self, sequence: DecodeSequence, reason: wire.EndReason, detail: str = ""
    ) -> None:
        spec = sequence.spec
        sequence.link.send(_ended(spec.request_id, spec.attempt, reason, detail))

    def _end(self, sequence: DecodeSequence, error: str | None) -> None:
        """The one way out of the table. With an error the engine drops the sequence; a copy under
        way is called off, and its blocks wait for it to return."""
        if not self._table.remove(sequence):
            return
        if sequence.deadline is not None:
            sequence.deadline.cancel()
        if sequence.fetching is not None:
            sequence.fetching.cancel()
        if sequence.offer is not None:
            self._tasks.spawn(self._imports.release(sequence.offer), "release")
            if sequence.fetching is not None:
                # The task is cancelled before its first step: no copy will return.
                self._tell(partial(Engine.drop_import, seq_id=sequence.spec.seq_id))
        if error is not None:
            self.counters.aborted += 1
            self._tell(partial(Engine.abort, seq_id=sequence.spec.seq_id))
        self._landed(sequence)
        self._changed()
        # Last: a bug in it keeps nothing from being given back.
        sequence.spans.end(error)

    def _landed(self, sequence: DecodeSequence) -> None:
        """The pool's own counts hold it from the next snapshot on, or never will."""
        if not sequence.landed:
            sequence.landed = True
            spec = sequence.spec
            self._snapshot.refresh(
                partial(self._promises.landed, sequence.link.stream, spec.request_id, spec.attempt)
            )

    async def _import(self, sequence: DecodeSequence, offer: Offer, ready: ImportReady) -> None:
        """Fetches the blocks. Whatever comes in between, the engine hears of it only once no copy
        runs any more."""
        sequence.offer = None
        seq_id = sequence.spec.seq_id
        usable = False
        lost = "the fetch was broken off"
        started_s = asyncio.get_running_loop().time()
        try:
            with sequence.spans.fetch() as fetched:
                fetched.result = result = await self._imports.fetch(offer, ready.moves)
                fetched.reason = self._imports.reason(offer.worker_id)
            spent_s = asyncio.get_running_loop().time() - started_s
            self.transfer_rate.add(result.num_bytes, spent_s)
            usable = True
        except TransferError as error:
            lost = str(error)
        except Exception:
            log.exception("request %s: the fetch failed", sequence.spec.request_id)
            lost = "the fetch failed"
        finally:
            sequence.fetching = None
            sequence.transfer_s = asyncio.get_running_loop().time() - started_s
            done = Engine.finish_import if usable else Engine.drop_import
            self._tell(partial(done, seq_id=seq_id))
            if not usable and sequence in self._table:
                # Told for whatever reason: a gateway that hears nothing waits to its deadline.
                log.warning("request %s: KV lost: %s", sequence.spec.request_id, lost)
                self.counters.kv_lost += 1
                self._tell_ended(sequence, wire.END_REASON_KV_LOST, lost)
                self._end(sequence, "kv_lost")

    def _tell(self, command: Callable[[Engine], object]) -> None:
        """Whatever the engine is told may make room, which only a new snapshot shows."""
        self._runtime.post(command)
        self._snapshot.refresh()

    # ------------------------------------------------------------ what the engine says

    def on_events(self, events: Sequence[EngineEvent], record: StepRecord | None) -> None:
        """A bug in what is done for one sequence ends that one; the others hear their news."""
        messages = StepMessages()
        # Before the tokens: the last chunk of a prompt may also be the end of its sequence.
        if record is not None:
            for chunk in record.chunks:
                try:
                    self._on_chunk(record, chunk)
                except Exception:
                    log.exception("a bug in the records of a chunk")
                    self._give_up(chunk.seq_id)
        for event in events:
            try:
                self._on_event(event, record, messages)
            except Exception:
                log.exception("a bug in what a step means for a sequence")
                self._give_up(event.seq_id)
        now_s = asyncio.get_running_loop().time()
        messages.send(record.end_s if record is not None else now_s)
        self._snapshot.step_done(record)

    def _on_chunk(self, record: StepRecord, chunk: ChunkRecord) -> None:
        if (sequence := self._table.of_engine(chunk.seq_id)) is not None:
            sequence.spans.chunk(record, chunk)
            self._landed(sequence)

    def _on_event(
        self, event: EngineEvent, record: StepRecord | None, messages: StepMessages
    ) -> None:
        sequence = self._table.of_engine(event.seq_id)
        if isinstance(event, ImportReady):
            self._on_import_ready(sequence, event)
        elif sequence is None:
            return
        elif isinstance(event, SequenceOutput):
            if record is not None:
                sequence.spans.tokens(record, event)
            self._landed(sequence)
            # Behind what may fail: of a sequence that is given up nothing follows its end.
            messages.add(sequence, event)
            if event.finish_reason is not None:
                self.counters.finished += 1
                self._end(sequence, None)
        else:
            self._on_failed(sequence, event)

    def _give_up(self, seq_id: SequenceId) -> None:
        if (sequence := self._table.of_engine(seq_id)) is not None:
            self.counters.failed += 1
            self._tell_ended(sequence, wire.END_REASON_FAILED, "internal")
            self._end(sequence, "internal")

    def _on_import_ready(self, sequence: DecodeSequence | None, ready: ImportReady) -> None:
        if sequence is None:
            # Ended just before: nothing was copied.
            self._tell(partial(Engine.drop_import, seq_id=ready.seq_id))
            return
        assert sequence.offer is not None
        # First: whatever fails after this, `_end` calls it off and has the blocks given back.
        sequence.fetching = self._tasks.spawn(
            self._import(sequence, sequence.offer, ready), f"import {sequence.spec.request_id}"
        )
        sequence.spans.admitted(asyncio.get_running_loop().time())
        self._landed(sequence)

    def _on_failed(self, sequence: DecodeSequence, failure: SequenceFailed) -> None:
        log.warning("request %s: %s", sequence.spec.request_id, failure.detail)
        self.counters.failed += 1
        self._tell_ended(sequence, wire.END_REASON_FAILED, failure.reason)
        self._end(sequence, failure.reason)


def _ended(
    request_id: RequestId, attempt: int, reason: wire.EndReason, detail: str
) -> wire.StreamResponse:
    ended = wire.Ended(request_id=request_id, attempt=attempt, reason=reason, detail=detail)
    return wire.StreamResponse(ended=ended)
