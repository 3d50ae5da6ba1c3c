"""The gateway's record of one request in flight: the source of truth (I7).

Prompt, tokens given so far and the current attempt are here and nowhere else; NATS and workers may
lose anything. Whatever arrives is fenced by attempt (I5) and de-duplicated by output index (I1).
"""

import asyncio
from dataclasses import dataclass, field

from common.types import FinishReason, TokenId, TokenLogprobs
from common.wire import worker as wire
from gateway.attempt import Attempt, AttemptLost
from gateway.request import Request


@dataclass(slots=True)
class Counters:
    """What was refused, and how often; exported as metrics."""

    fenced: int = 0
    duplicates: int = 0
    attempts: int = 0
    jobs_published: int = 0
    worker_lost: int = 0
    kv_lost: int = 0
    poison: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0


@dataclass(slots=True)
class Arrival:
    """Tokens as they came from a worker."""

    index: int
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    matched_token_id: TokenId | None = None

    def extend(self, later: "Arrival") -> None:
        """Takes in what followed this one."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.matched_token_id = later.matched_token_id


@dataclass(slots=True)
class Accounting:
    """Usage and times collected on the way. The two sums are those of the first attempt that gave
    a token; what later attempts compute again is ``recomputed``."""

    prefill_computed: int = 0
    prefill_cached: int = 0
    decode_cached: int = 0
    decode_transferred: int = 0
    decode_computed: int = 0
    recomputed: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    queue_ms: float = 0.0
    prefill_queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    decode_queue_ms: float = 0.0
    decode_ms: float = 0.0
    prefill_counted: bool = False
    decode_counted: bool = False


class Run:
    """One request from admission to its single end."""

    def __init__(self, request: Request, now_s: float, counters: Counters) -> None:
        self.request = request
        self.started_s = now_s
        self.deadline_s = now_s + request.timeout_s
        self.first_token_s: float | None = None
        # When the client was last sent any.
        self.last_token_s: float | None = None
        self.output_ids: list[TokenId] = []
        # New tokens that the request's task has not taken yet.
        self._arrived: Arrival | None = None
        self.accounting = Accounting()
        self.num_failures = 0
        self.num_dead_owners = 0
        self.stalled_since_s: float | None = None
        # Between these its KV was lost: other pairs of workers first.
        self.excluded_decode: set[str] = set()
        self.excluded_prefill: set[str] = set()
        self.attempt: Attempt | None = None
        # Of the prompt's full blocks, once the router has computed them.
        self.key_prefixes: tuple[int, ...] | None = None
        self._num_attempts = 0
        self._changed = asyncio.Event()
        self._counters = counters

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_attempts(self) -> int:
        return self._num_attempts

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def resumed(self) -> bool:
        return self._num_attempts > 1

    def remaining_ms(self, now_s: float) -> int:
        return max(0, int((self.deadline_s - now_s) * 1000))

    def new_attempt(self) -> Attempt:
        """Fences everything that speaks of an earlier attempt from now on. Room that was promised
        and not used stays with the request."""
        before = self.attempt
        self._num_attempts += 1
        self._changed.clear()
        self.attempt = Attempt(self._num_attempts, self._changed)
        if before is not None and not before.decode_started:
            self.attempt.link = before.link
        self._counters.attempts += 1
        return self.attempt

    def current(self, attempt_number: int) -> Attempt | None:
        """The current attempt if that is its number; a stale number is counted."""
        if self.attempt is not None and self.attempt.number == attempt_number:
            return self.attempt
        self._counters.fenced += 1
        return None

    def receive(self, arrival: Arrival) -> None:
        """Takes tokens of the current attempt; drops indices that the run already has."""
        assert self.attempt is not None
        have = len(self.output_ids)
        if arrival.index > have:
            self.attempt.lose(AttemptLost("failed", counts=True))
            return
        if skip := have - arrival.index:
            self._counters.duplicates += min(skip, len(arrival.token_ids))
            arrival.index = have
            arrival.token_ids = arrival.token_ids[skip:]
            arrival.logprobs = arrival.logprobs[skip:]
            arrival.prompt_logprobs = ()
        self.output_ids += arrival.token_ids
        if arrival.token_ids or arrival.finish_reason is not None or arrival.prompt_logprobs:
            if self._arrived is None:
                self._arrived = arrival
            else:
                self._arrived.extend(arrival)
        self._changed.set()

    async def wait_change(self) -> None:
        """Returns once anything was heard; raises AttemptLost when the attempt is lost and every
        token that came before the loss has been taken."""
        assert self.attempt is not None
        if self._arrived is None and self.attempt.lost is None:
            await self._changed.wait()
        self._changed.clear()
        if self.attempt.lost is not None and self._arrived is None:
            raise self.attempt.lost

    def take_arrival(self) -> Arrival | None:
        """All that came since the last call, as one."""
        taken, self._arrived = self._arrived, None
        return taken

    def note_prefill(self, result: wire.PrefillResult) -> None:
        account = self.accounting
        if not account.prefill_counted and not self.output_ids:
            account.prefill_counted = True
            account.prefill_computed = result.computed_tokens
            account.prefill_cached = result.cached_tokens
        else:
            account.recomputed += result.computed_tokens
        account.prefill_queue_ms += result.queue_ms
        account.prefill_ms += result.prefill_ms

    def close_attempt(self) -> None:
        """Adds up what the decode worker last said of this attempt's sequence."""
        usage = self.attempt.decode_usage if self.attempt is not None else None
        if usage is None:
            return
        account = self.accounting
        if not account.decode_counted:
            account.decode_counted = True
            account.decode_cached = usage.cached_tokens
            account.decode_transferred = usage.transferred_tokens
            account.decode_computed = usage.computed_tokens
        else:
            account.recomputed += usage.computed_tokens
        account.recomputed += usage.recomputed_tokens
        account.preemptions += usage.preemptions
        account.drafted += usage.drafted
        account.accepted += usage.accepted
        account.transfer_ms += usage.transfer_ms
        account.decode_queue_ms += usage.queue_ms
        account.prefill_ms += usage.prefill_ms
        account.decode_ms += usage.decode_ms


@dataclass(slots=True)
class Runs:
    """All requests in flight at this gateway, by our own id."""

    counters: Counters = field(default_factory=Counters)
    by_id: dict[str, Run] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        self.by_id[run.request_id] = run

    def remove(self, run: Run) -> None:
        self.by_id.pop(run.request_id, None)

    def current(self, request_id: str, attempt: int) -> tuple[Run, Attempt] | None:
        """The run and its attempt if both are live and current; else counted as fenced."""
        run = self.by_id.get(request_id)
        if run is None:
            self.counters.fenced += 1
            return None
        current = run.current(attempt)
        return None if current is None else (run, current)
