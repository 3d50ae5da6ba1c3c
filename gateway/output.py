"""From arrivals of tokens to what the client is sent: text, stop strings, pace, slow clients.

The request's own task pushes tokens in; the client's writer takes deltas out. What the client
has not taken yet is one merged delta, bounded by the request's max_tokens.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from common.errors import RequestCancelled
from common.types import FinishReason, TokenId
from gateway.detokenizer import Detokenizer
from gateway.request import Delta, Request
from gateway.run import Arrival


@dataclass(frozen=True, slots=True)
class Finish:
    """Why the output is over, and how many tokens it has."""

    reason: FinishReason
    num_tokens: int
    matched_token_id: TokenId | None = None
    matched_string: str | None = None


class Output:
    """One choice's way out. `push` and `flush` are called by one task, `deltas` by another."""

    def __init__(self, request: Request, detokenizer: Detokenizer, slow_client_s: float) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._slow_client_s = slow_client_s
        self._num_tokens = 0
        self._waiting: Delta | None = None
        self._waiting_since_s = 0.0
        self._closed = False
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()

    def push(self, arrival: Arrival) -> Finish | None:
        """Adds tokens; the Finish when one of them ended the output. Nothing may follow it. The
        text of a stop token is shown no more than that of a stop string, as in vLLM.
        Raises RequestCancelled when the client has stopped reading."""
        hides_last = arrival.matched_token_id is not None and not self._request.include_stop
        shown = arrival.token_ids[:-1] if hides_last else arrival.token_ids
        released = self._detokenizer.push(shown)
        text, finish = released.text, None
        used = released.num_tokens if released.stop is not None else len(arrival.token_ids)
        self._num_tokens += used
        if released.stop is not None:
            finish = Finish(FinishReason.STOP, self._num_tokens, None, released.stop)
        elif arrival.finish_reason is not None:
            finish = Finish(arrival.finish_reason, self._num_tokens, arrival.matched_token_id)
            text += self._detokenizer.finish()
        self._add(
            Delta(
                arrival.index,
                arrival.token_ids[:used],
                text,
                arrival.logprobs[:used],
                arrival.prompt_logprobs,
            )
        )
        return finish

    def _add(self, delta: Delta) -> None:
        now = asyncio.get_running_loop().time()
        if self._waiting is None:
            self._waiting = delta
            self._waiting_since_s = now
        elif now - self._waiting_since_s > self._slow_client_s:
            raise RequestCancelled("the client has stopped reading")
        else:
            self._waiting = self._waiting + delta
        self._changed.set()

    def close(self) -> None:
        """No more deltas come."""
        self._closed = True
        self._changed.set()

    async def drained(self) -> None:
        """Returns when the client has taken everything; raises RequestCancelled if it does not."""
        try:
            async with asyncio.timeout(self._slow_client_s):
                while self._waiting is not None:
                    self._taken.clear()
                    await self._taken.wait()
        except TimeoutError:
            raise RequestCancelled("the client has stopped reading") from None

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes, merged while the client was busy, until closed."""
        while True:
            if self._waiting is not None:
                delta, self._waiting = self._waiting, None
                self._taken.set()
                yield delta
                continue
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()
