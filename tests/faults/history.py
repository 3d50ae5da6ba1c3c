"""What one client saw of one request, and everything that is wrong with it.

1. `watch` runs a request and writes down each message as it comes: when, which index, which ids,
   or how it ended. It judges nothing while it runs.
2. `History.faults` compares the whole with the oracle: each output index once, the right ids, one
   end and nothing after it. An empty list means that the client could not tell that anything broke.
3. `History.refusal` is the typed error that ended it instead, if one did; whether that was allowed
   is for the scenario to say.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from support.oracle_requests import Case

from common.client import BatonClient, Completion
from common.errors import BatonError
from common.types import FinishReason, TokenId


@dataclass(frozen=True, slots=True)
class Message:
    """``at_s`` on the loop's clock; ``end`` is set in the last."""

    at_s: float
    index: int
    token_ids: tuple[TokenId, ...]
    end: Completion | None


@dataclass
class History:
    case: Case
    started_s: float
    messages: list[Message] = field(default_factory=list)
    refusal: BatonError | None = None

    @property
    def token_ids(self) -> list[TokenId]:
        return [token_id for message in self.messages for token_id in message.token_ids]

    @property
    def attempts(self) -> int:
        ends = [message.end for message in self.messages if message.end is not None]
        return ends[-1].attempts if ends else 0

    @property
    def longest_pause_s(self) -> float:
        """Between two messages, or before the first."""
        times = [self.started_s, *(message.at_s for message in self.messages)]
        return max((after - before for before, after in pairwise(times)), default=0.0)

    def faults(self) -> list[str]:
        """Wrong, repeated or missing tokens and ends; of a refused request, of what it got."""
        found: list[str] = []
        expected = 0
        ended = False
        for message in self.messages:
            if ended:
                found.append("something after the end")
            if message.token_ids and message.index != expected:
                found.append("repeated" if message.index < expected else "missing")
            expected = max(expected, message.index + len(message.token_ids))
            ended = ended or message.end is not None
        right = self.case.right_ids()
        got = self.token_ids
        if got != right[: len(got)]:
            found.append("wrong")
        if self.refusal is None:
            found += self._faults_of_the_end(len(got), len(right))
        elif ended:
            found.append("an error after the end")
        return found

    def _faults_of_the_end(self, num_got: int, num_right: int) -> list[str]:
        ends = [message.end for message in self.messages if message.end is not None]
        if not ends:
            return ["no end"]
        usage = ends[0].usage
        checks = {
            "too short": num_got >= num_right,
            "ended for another reason": ends[0].finish_reason is FinishReason.LENGTH,
            "prompt counted wrong": usage.prompt_tokens == len(self.case.prompt_ids),
            "output counted wrong": usage.output_tokens == num_got,
        }
        return [name for name, holds in checks.items() if not holds]


OnMessage = Callable[[History], None]


async def watch(client: BatonClient, case: Case, on_message: OnMessage = lambda _: None) -> History:
    """Runs one request to its end, whichever it is."""
    clock = asyncio.get_running_loop().time
    history = History(case, clock())
    try:
        async for chunk in client.generate(case.prompt_ids, case.sampling):
            history.messages.append(Message(clock(), chunk.index, chunk.token_ids, chunk.complete))
            on_message(history)
    except BatonError as error:
        history.refusal = error
    return history
