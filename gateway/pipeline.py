"""The life of a request at the gateway.

1. `generate` checks that it can ever be served, has admission let it wait for a worker, and enters
   it in the books (`Run`).
2. An attempt begins. In its turn the request asks a decode worker for room.
3. With room promised its job goes to the prefill pool; the ticket brings the first token, which
   the client gets at once. Or the decode worker computes the prompt itself, where that is cheaper
   (gateway/local_prefill.py); then 4 has no offer.
4. `Start` hands the ticket's offer to the decode worker, which fetches the blocks and goes on; its
   tokens come in over the link, fenced and de-duplicated by the run.
5. Every token passes the detokeniser and the stop strings and leaves at most every
   ``flush_interval_s``.
6. An attempt that is lost is followed by another, which computes prompt and output so far again and
   samples the next index; the client sees a pause. Failures are counted, and end at a limit.
7. However it ends (answer, error, deadline, a client that left), every phase is told and both pools
   get their blocks back.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator

from common.config import GatewaySettings
from common.errors import (
    BatonError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Unavailable,
)
from common.failpoints import hit_async
from common.logging import about
from common.telemetry import Carrier, Span, Telemetry
from common.types import FinishReason, Role
from common.wire import finish_reason_from_proto, logprobs_from_proto
from common.wire import worker as wire
from gateway.admission import Admission
from gateway.attempt import Attempt, AttemptLost
from gateway.decode_link import DecodeLink, ReserveRefused
from gateway.decode_pool import DecodePool
from gateway.local_prefill import LocalPrefillRule
from gateway.offers import OfferKeeper
from gateway.output import Finish, Output
from gateway.patience import Patience
from gateway.prefill_dispatch import PATIENCE_S, PrefillDispatch
from gateway.registry import WorkerRegistry
from gateway.report import completed
from gateway.request import OutputEvent, Request
from gateway.request_meter import RequestMeter
from gateway.run import Arrival, Run, Runs
from gateway.sequence_state import sequence_state
from gateway.tokenizer import IdTokenizer

log = logging.getLogger(__name__)

# A worker or NATS that refuses at once is not asked again before this.
RETRY_S = 0.1
# Losses that are nobody's failure and may repeat, until patience is over.
_STALLS = {
    "nats_down": "the job queue cannot be reached",
    "queue_full": "the job queue is full",
}


class Pipeline:
    """Everything between a parsed request and its output; gRPC and HTTP both stand on it."""

    def __init__(
        self,
        settings: GatewaySettings,
        runs: Runs,
        registry: WorkerRegistry,
        admission: Admission,
        decode: DecodePool,
        prefill: PrefillDispatch,
        local_prefill: LocalPrefillRule,
        offers: OfferKeeper,
        tokenizer: IdTokenizer,
        telemetry: Telemetry,
    ) -> None:
        self._settings = settings
        self._runs = runs
        self._registry = registry
        self._admission = admission
        self._decode = decode
        self._prefill = prefill
        self._local_prefill = local_prefill
        self._offers = offers
        self._tokenizer = tokenizer
        self._telemetry = telemetry
        self.meter = RequestMeter()
        self.draining = False

    # ------------------------------------------------------------ from request to output

    async def generate(
        self, request: Request, parent: Carrier
    ) -> AsyncGenerator[OutputEvent, None]:
        """Deltas, then one Completed. Raises a BatonError instead of Completed. Closing the
        iterator cancels the request everywhere."""
        self._check(request)
        loop = asyncio.get_running_loop()
        run = Run(request, loop.time(), self._runs.counters)
        detokenizer = self._tokenizer.detokenizer(
            prompt_ids=request.prompt_ids,
            stop=request.stop,
            include_stop_str_in_output=request.include_stop,
            skip_special_tokens=request.skip_special_tokens,
            min_tokens=request.params.min_tokens,
        )
        output = Output(request, detokenizer, self._settings.slow_client_s)
        self._admission.enter(run)
        self._runs.add(run)
        driver = loop.create_task(self._drive(run, output, parent))
        try:
            async for delta in output.deltas():
                yield delta
            finish = await driver
            self._runs.counters.completed += 1
            end = completed(run, finish, loop.time())
            self.meter.completed(run, end)
            yield end
        except BatonError:
            self._runs.counters.failed += 1
            self.meter.ended["error"] += 1
            raise
        finally:
            try:
                if not driver.done():
                    self._runs.counters.cancelled += 1
                    self.meter.ended["abort"] += 1
                    driver.cancel()
                    await asyncio.wait((driver,))
                if not driver.cancelled():
                    driver.exception()  # nobody is there any more to be told
            finally:
                self._admission.leave(run)
                self._runs.remove(run)

    def _check(self, request: Request) -> None:
        """Refuses at once what can never, or not now, be served."""
        if self.draining:
            raise Unavailable("this gateway is shutting down")
        has_prefill = bool(self._registry.ready(Role.PREFILL))
        local = [link for link in self._decode.links.values() if self._decode.is_local(link)]
        if not self._registry.ready(Role.DECODE):
            raise Unavailable("no decode worker is up", pool="decode")
        if not has_prefill and not local:
            raise Unavailable("no prefill worker is up", pool="prefill")
        block_size = max(1, self._registry.block_size)
        prompt_blocks = -(-len(request.prompt_ids) // block_size) + 1
        pools = [self._registry.largest_pool(Role.DECODE)]
        if has_prefill and not local:
            pools.append(self._registry.largest_pool(Role.PREFILL))
        limit = min(pools)
        if prompt_blocks > limit:
            raise InvalidRequest(
                "prompt",
                f"{len(request.prompt_ids)} tokens need {prompt_blocks} KV blocks of {block_size} "
                f"tokens and the pool has {limit}; send at most {(limit - 1) * block_size} tokens",
            )

    async def _drive(self, run: Run, output: Output, parent: Carrier) -> Finish:
        try:
            async with asyncio.timeout_at(run.deadline_s):
                finish = await self._attempts(run, output, parent)
            output.close()
            await output.drained()
            return finish
        except TimeoutError:
            raise DeadlineExceeded(
                f"not finished in {run.request.timeout_s:g} s; {len(run.output_ids)} tokens given"
            ) from None
        finally:
            output.close()

    async def _attempts(self, run: Run, output: Output, parent: Carrier) -> Finish:
        """Attempts until one gives the answer. A promise of room not used by a lost attempt is
        taken over by the next."""
        try:
            while True:
                attempt = run.new_attempt()
                attributes = {"baton.attempt": attempt.number}
                with self._telemetry.span("attempt", parent, attributes) as span:
                    attempt.trace_context = dict(span.carrier)
                    try:
                        return await self._attempt(run, attempt, output, span)
                    except AttemptLost as lost:
                        attempt.lose(lost)
                        span.end(lost.reason)
                        self._after_loss(run, lost)
                    finally:
                        await self._stop_work(run, attempt)
                await asyncio.sleep(RETRY_S)
        finally:
            self._give_back_room(run)

    def _after_loss(self, run: Run, lost: AttemptLost) -> None:
        """Raises when the request has lost too much to go on."""
        log.warning(
            "attempt lost: %s, %d tokens given",
            lost.reason,
            len(run.output_ids),
            extra=about(run.request_id),
        )
        run.num_failures += lost.counts
        run.num_dead_owners += lost.owner_died
        given = f"; {len(run.output_ids)} tokens were given" if run.output_ids else ""
        if run.num_dead_owners >= 2:
            self._runs.counters.poison += 1
            raise InternalError(f"two workers were lost while they held this request{given}")
        if run.num_failures >= self._settings.max_attempts:
            raise Unavailable(f"given up after {run.num_failures} failures{given}")
        if lost.reason not in _STALLS:
            run.stalled_since_s = None
            return
        now = asyncio.get_running_loop().time()
        run.stalled_since_s = run.stalled_since_s if run.stalled_since_s is not None else now
        if now - run.stalled_since_s >= PATIENCE_S:
            raise Unavailable(f"{_STALLS[lost.reason]}{given}")

    async def _stop_work(self, run: Run, attempt: Attempt) -> None:
        """Tells whoever may still work on this attempt that nobody waits for it."""
        run.close_attempt()
        ticket = attempt.ticket
        if ticket is not None and ticket.result.HasField("offer") and not attempt.decode_started:
            self._offers.release(ticket.result.offer)
        self._registry.ended(run.request_id, attempt.number)
        if attempt.link is not None and attempt.decode_started and not attempt.decode_finished:
            attempt.link.abort(run.request_id, attempt.number)
        await self._prefill.cancel(run, attempt)

    def _give_back_room(self, run: Run) -> None:
        attempt = run.attempt
        if attempt is not None and attempt.link is not None and not attempt.decode_started:
            attempt.link.unreserve(run.request_id, attempt.number)

    # ------------------------------------------------------------ one attempt

    async def _attempt(self, run: Run, attempt: Attempt, output: Output, span: Span) -> Finish:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        if await self._find_room(run, attempt, span):
            self._admission.leave(run)
            run.accounting.queue_ms += (loop.time() - began_s) * 1000
            return await self._run_decode(run, attempt, None, output, span)
        result = await self._prefill.prefill(run, attempt)
        run.accounting.queue_ms += max(
            0.0, (loop.time() - began_s) * 1000 - result.queue_ms - result.prefill_ms
        )
        run.note_prefill(result)
        run.receive(_first_tokens(run, result))
        finish = self._emit(run, output)
        if finish is not None:
            return finish
        return await self._run_decode(run, attempt, result.offer, output, span)

    async def _find_room(self, run: Run, attempt: Attempt, span: Span) -> bool:
        """A promise of room on a decode worker, in the request's turn; True when that worker
        computes the prompt itself. A request of one token needs none."""
        prefill_up = bool(self._registry.ready(Role.PREFILL))
        if prefill_up and run.request.params.max_tokens - len(run.output_ids) <= 1:
            return False
        patience = self._decode.patience(run)
        if attempt.link is not None and attempt.link.connected:
            # Room that the last attempt left unused: waiting in the queue with it in hand would
            # have those wait for it who are before us there.
            link = await self._reserve(run, attempt, not prefill_up, patience)
        else:
            async with self._admission.turn(run, patience.look if run.resumed else None):
                prefill_up = bool(self._registry.ready(Role.PREFILL))
                link = await self._reserve(run, attempt, not prefill_up, patience)
        reason = self._local_prefill.decide(run, link.worker_id)
        span.set("baton.prefill", "local" if reason.is_local else "remote")
        span.set("baton.prefill_reason", reason.value)
        return reason.is_local

    async def _reserve(
        self, run: Run, attempt: Attempt, prefer_local: bool, patience: Patience
    ) -> DecodeLink:
        num_blocks = -(-run.num_tokens // max(1, self._registry.block_size)) + 1
        try:
            return await self._decode.reserve(run, attempt, num_blocks, prefer_local, patience)
        except ReserveRefused as refused:
            attempt.link = None
            if refused.reason == "too_large":
                raise InvalidRequest(
                    "prompt", "needs more KV blocks than a decode worker has"
                ) from None
            raise AttemptLost(refused.reason, counts=refused.reason == "internal") from None

    async def _run_decode(
        self,
        run: Run,
        attempt: Attempt,
        offer: wire.Offer | None,
        output: Output,
        span: Span,
    ) -> Finish:
        await hit_async("gateway.before_start")
        link = attempt.link
        assert link is not None
        if link.closed or attempt.lost is not None:
            raise attempt.lost or AttemptLost("worker_lost")
        now = asyncio.get_running_loop().time()
        link.start(attempt, wire.Start(sequence=sequence_state(run, attempt, now), offer=offer))
        self._decode.router.sent(run, link.worker_id)
        self._registry.started(run.request_id, attempt.number, link.worker_id)
        span.set("baton.decode_worker", link.worker_id)
        if offer is None:
            return await self._stream(run, output, link)
        try:
            async with self._offers.kept(offer):
                return await self._stream(run, output, link)
        except BaseException:
            if attempt.decode_usage is None:
                self._offers.release(offer)
            raise

    async def _stream(self, run: Run, output: Output, link: DecodeLink) -> Finish:
        while True:
            await run.wait_change()
            finish = self._emit(run, output)
            if finish is not None:
                self._decode.router.sent(run, link.worker_id)
                return finish
            await asyncio.sleep(self._settings.flush_interval_s)

    def _emit(self, run: Run, output: Output) -> Finish | None:
        arrival = run.take_arrival()
        if arrival is None:
            return None
        now_s = asyncio.get_running_loop().time()
        if run.first_token_s is None and arrival.token_ids:
            run.first_token_s = now_s
        num_before = output.num_tokens
        finish = output.push(arrival)
        self.meter.emitted(run, output.num_tokens - num_before, now_s)
        return finish


def _first_tokens(run: Run, result: wire.PrefillResult) -> Arrival:
    """What the ticket brought. A request of no output tokens ends with its prompt's logprobs."""
    reason = finish_reason_from_proto(result.finish_reason)
    if not result.token_ids and reason is None:
        reason = FinishReason.LENGTH
    matched = result.token_ids[-1] if reason is FinishReason.STOP and result.token_ids else None
    return Arrival(
        len(run.output_ids),
        tuple(result.token_ids),
        logprobs_from_proto(result.logprobs),
        logprobs_from_proto(result.prompt_logprobs),
        reason,
        matched,
    )
