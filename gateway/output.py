"""From arrivals of tokens to what the client is sent: text, stop strings, pace, slow clients.

The request's own task pushes tokens in; the client's writer takes deltas out. What the client
has not taken yet is merged into deltas of at most `MAX_DELTA_TOKENS`: after a pause of any process
on the way a client sees a few messages at once, not a large one.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace

from common.errors import RequestCancelled
from common.types import FinishReason, TokenId
from gateway.detokenizer import Detokenizer
from gateway.request import Delta, Request
from gateway.run import Arrival

MAX_DELTA_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Finish:
    """Why the output is over, and how many tokens it has."""

    reason: FinishReason
    num_tokens: int
    matched_token_id: TokenId | None = None
    matched_string: str | None = None


class Output:
    """One choice's way out. `push` and `flush` are called by one task, `deltas` by another.
    ``num_tokens`` have been given to the client so far."""

    def __init__(self, request: Request, detokenizer: Detokenizer, slow_client_s: float) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._slow_client_s = slow_client_s
        self.num_tokens = 0
        self._waiting: deque[Delta] = deque()
        self._waiting_since_s = 0.0
        self._closed = False
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()

    def push(self, arrival: Arrival) -> Finish | None:
        """Adds tokens; the Finish when one of them ended the output. Nothing may follow it. The
        text of a stop token is shown no more than that of a stop string, as in vLLM.
        Raises RequestCancelled when the client has stopped reading."""
        for part in _parts(arrival):
            finish = self._push_part(part)
            if finish is not None:
                return finish
        return None

    def _push_part(self, arrival: Arrival) -> Finish | None:
        hides_last = arrival.matched_token_id is not None and not self._request.include_stop
        shown = arrival.token_ids[:-1] if hides_last else arrival.token_ids
        released = self._detokenizer.push(shown)
        text, finish = released.text, None
        used = released.num_tokens if released.stop is not None else len(arrival.token_ids)
        self.num_tokens += used
        if released.stop is not None:
            finish = Finish(FinishReason.STOP, self.num_tokens, None, released.stop)
        elif arrival.finish_reason is not None:
            finish = Finish(arrival.finish_reason, self.num_tokens, arrival.matched_token_id)
            text += self._detokenizer.finish()
        self._add(
            Delta(
                arrival.index,
                arrival.token_ids[:used],
                text,
                arrival.logprobs[:used],
                arrival.prompt_logprobs,
                last=finish is not None,
            )
        )
        return finish

    def _add(self, delta: Delta) -> None:
        now = asyncio.get_running_loop().time()
        waiting = self._waiting
        if not waiting:
            waiting.append(delta)
            self._waiting_since_s = now
        elif now - self._waiting_since_s > self._slow_client_s:
            raise RequestCancelled("the client has stopped reading")
        elif len(waiting[-1].token_ids) + len(delta.token_ids) <= MAX_DELTA_TOKENS:
            waiting[-1] += delta
        else:
            waiting.append(delta)
        self._changed.set()

    def close(self) -> None:
        """No more deltas come."""
        self._closed = True
        self._changed.set()

    async def drained(self) -> None:
        """Returns when the client has taken everything; raises RequestCancelled if it does not."""
        try:
            async with asyncio.timeout(self._slow_client_s):
                while self._waiting:
                    self._taken.clear()
                    await self._taken.wait()
        except TimeoutError:
            raise RequestCancelled("the client has stopped reading") from None

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes, merged while the client was busy, until closed."""
        while True:
            if self._waiting:
                delta = self._waiting.popleft()
                self._waiting_since_s = asyncio.get_running_loop().time()
                self._taken.set()
                yield delta
                continue
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()


def _parts(arrival: Arrival) -> Iterator[Arrival]:
    """The arrival in pieces of at most MAX_DELTA_TOKENS; its end belongs to the last."""
    num_tokens = len(arrival.token_ids)
    for start in range(0, max(num_tokens, 1), MAX_DELTA_TOKENS):
        end = start + MAX_DELTA_TOKENS
        ends = end >= num_tokens
        yield replace(
            arrival,
            index=arrival.index + start,
            token_ids=arrival.token_ids[start:end],
            logprobs=arrival.logprobs[start:end],
            prompt_logprobs=() if start else arrival.prompt_logprobs,
            finish_reason=arrival.finish_reason if ends else None,
            matched_token_id=arrival.matched_token_id if ends else None,
        )
