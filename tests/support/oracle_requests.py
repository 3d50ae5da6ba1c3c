"""Requests to a cluster on the oracle model, and whether their answers are right."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from common.client import BatonClient, Completion, Sampling
from common.types import FinishReason, SamplingParams, TokenId
from engine.oracle import reference_ids

VOCAB_SIZE = 512
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One request: greedy, or with a seed at temperature 0.8."""

    prompt_ids: tuple[TokenId, ...]
    max_tokens: int
    seed: int | None = None

    @property
    def num_prompt_blocks(self) -> int:
        return -(-len(self.prompt_ids) // BLOCK_SIZE)

    @property
    def sampling(self) -> Sampling:
        temperature = 0.0 if self.seed is None else 0.8
        return Sampling(max_tokens=self.max_tokens, temperature=temperature, seed=self.seed or 0)

    def right_ids(self) -> list[TokenId]:
        params = SamplingParams(
            max_tokens=self.max_tokens,
            seed=self.seed or 0,
            temperature=0.0 if self.seed is None else 0.8,
        )
        return reference_ids(self.prompt_ids, params, VOCAB_SIZE)


def make_cases(
    seed: int, num_cases: int, prompt_tokens: tuple[int, int], max_tokens: tuple[int, int]
) -> list[Case]:
    """Random prompts, every second one sampled; the ranges are inclusive."""
    rng = random.Random(seed)
    return [
        Case(
            prompt_ids=tuple(rng.choices(range(VOCAB_SIZE), k=rng.randint(*prompt_tokens))),
            max_tokens=rng.randint(*max_tokens),
            seed=rng.getrandbits(63) if i % 2 else None,
        )
        for i in range(num_cases)
    ]


@dataclass
class Answer:
    """What a client got for a case. Times are of the loop's clock."""

    case: Case
    started_s: float
    token_ids: list[TokenId] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    completion: Completion | None = None

    @property
    def attempts(self) -> int:
        assert self.completion is not None
        return self.completion.attempts

    @property
    def longest_pause_s(self) -> float:
        """Between two messages, or before the first."""
        times = [self.started_s, *self.arrivals_s]
        return max(after - before for before, after in pairwise(times))

    def assert_right(self) -> None:
        """The right ids, each index once, and exactly one end."""
        assert self.completion is not None, "it has no end"
        assert self.token_ids == self.case.right_ids()
        assert self.completion.finish_reason is FinishReason.LENGTH
        usage = self.completion.usage
        assert usage.prompt_tokens == len(self.case.prompt_ids)
        assert usage.output_tokens == self.case.max_tokens


OnTokens = Callable[[Answer], None]


async def ask(client: BatonClient, case: Case, on_tokens: OnTokens = lambda _: None) -> Answer:
    """Runs one request to its end. ``on_tokens`` is called whenever some have come."""
    clock = asyncio.get_running_loop().time
    answer = Answer(case, clock())
    async for chunk in client.generate(case.prompt_ids, case.sampling):
        assert answer.completion is None, "something came after the end"
        answer.arrivals_s.append(clock())
        if chunk.token_ids:
            assert chunk.index == len(answer.token_ids), "an index is missing or repeated"
            answer.token_ids += chunk.token_ids
            on_tokens(answer)
        answer.completion = chunk.complete
    return answer


async def ask_all(client: BatonClient, cases: Sequence[Case]) -> list[Answer]:
    """All at once."""
    return list(await asyncio.gather(*(ask(client, case) for case in cases)))
