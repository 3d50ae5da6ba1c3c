"""The load generator: plays sessions against a target and notes when everything arrived.

1. *Open loop*: a session begins at its arrival time, whatever became of those before it. *Closed
   loop*: so many sessions at once, the next begins when one ends.
2. Within a session the next turn is sent when the last answer is complete.
3. Each request becomes one `Outcome`. A turn that was refused or failed ends its session.

Times are of the running loop. Those of an open loop's first turn count from when it was due, not
from when it was sent: a generator that falls behind must not flatter what it measures.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from cli.bench.target import Target
from cli.bench.workloads import Session, tokens
from common.errors import BatonError, Overloaded
from common.types import TokenId, Usage


class Ending(StrEnum):
    OK = "ok"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(slots=True)
class Outcome:
    """One request. ``arrivals`` are (when, number of tokens) of every message that had any.
    ``reason`` is the error of one that did not end well. Properties need what their text says."""

    session: int
    turn: int
    start_s: float
    num_prompt: int
    end_s: float = 0.0
    ending: Ending = Ending.OK
    reason: str = ""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    usage: Usage | None = None
    trace_id: str = ""

    @property
    def num_output(self) -> int:
        counted = sum(count for _, count in self.arrivals)
        return self.usage.output_tokens if self.usage else counted

    @property
    def ttft_s(self) -> float:
        """Time to first token; needs one."""
        return self.arrivals[0][0] - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first; None with one token."""
        if self.num_output < 2:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (self.num_output - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies as a user sees them: gaps between messages that had tokens."""
        return [after - before for (before, _), (after, _) in pairwise(self.arrivals)]

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.start_s


OnEnd = Callable[[Outcome], None]


def _ignore(_: Outcome) -> None:
    """Nobody watches."""


async def run_open(
    target: Target,
    sessions: Sequence[Session],
    arrivals_s: Sequence[float],
    on_end: OnEnd = _ignore,
) -> list[Outcome]:
    """Session i begins ``arrivals_s[i]`` seconds from now; ascending."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    player = _Player(target, on_end)
    async with asyncio.TaskGroup() as group:
        for number, (session, arrival_s) in enumerate(zip(sessions, arrivals_s, strict=True)):
            due_s = start_s + arrival_s
            await asyncio.sleep(due_s - loop.time())
            group.create_task(player.play(number, session, due_s))
    return player.outcomes


async def run_closed(
    target: Target, sessions: Sequence[Session], concurrency: int, on_end: OnEnd = _ignore
) -> list[Outcome]:
    """``concurrency`` sessions at once until all have been played."""
    loop = asyncio.get_running_loop()
    waiting: Iterator[tuple[int, Session]] = iter(enumerate(sessions))
    player = _Player(target, on_end)

    async def play_on() -> None:
        for number, session in waiting:
            await player.play(number, session, loop.time())

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(play_on())
    return player.outcomes


class _Player:
    def __init__(self, target: Target, on_end: OnEnd) -> None:
        self.outcomes: list[Outcome] = []
        self._target = target
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()

    async def play(self, number: int, session: Session, start_s: float) -> None:
        history: tuple[TokenId, ...] = ()
        for index, turn in enumerate(session.turns):
            history += turn.new_ids
            outcome = Outcome(number, index, start_s, len(history))
            is_last = index == len(session.turns) - 1
            answer = await self._ask(outcome, history, turn.max_tokens, not is_last)
            self.outcomes.append(outcome)
            self._on_end(outcome)
            if outcome.ending is not Ending.OK:
                return
            # An endpoint that hides its ids gets others of the same number in their place.
            missing = max(0, turn.max_tokens - len(answer))
            history += answer + tokens(random.Random(f"answer {number} {index}"), missing)
            start_s = self._loop.time()

    async def _ask(
        self, outcome: Outcome, prompt_ids: Sequence[TokenId], max_tokens: int, wants_ids: bool
    ) -> tuple[TokenId, ...]:
        answer: tuple[TokenId, ...] = ()
        try:
            async with aclosing(self._target.send(prompt_ids, max_tokens, wants_ids)) as pieces:
                async for piece in pieces:
                    if piece.num_tokens:
                        outcome.arrivals.append((self._loop.time(), piece.num_tokens))
                        answer += piece.token_ids
                    if piece.usage is not None:
                        outcome.usage, outcome.trace_id = piece.usage, piece.trace_id
            if not outcome.arrivals:
                outcome.ending, outcome.reason = Ending.FAILED, "ended without a token"
        except Overloaded as error:
            outcome.ending, outcome.reason = Ending.REFUSED, error.message
        except BatonError as error:
            outcome.ending, outcome.reason = Ending.FAILED, error.message
        outcome.end_s = self._loop.time()
        return answer
