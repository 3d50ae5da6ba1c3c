"""Whole answers of a gateway, collected by choice, and whether they are well formed (I1)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from common.client import BatonClient, Completion, Prompt, Sampling
from common.types import SamplingParams, TokenId, TokenLogprobs


@dataclass
class Answer:
    token_ids: list[TokenId] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    completion: Completion | None = None

    @property
    def complete(self) -> Completion:
        assert self.completion is not None, "it has no end"
        return self.completion


async def answers_of(
    client: BatonClient, prompt: Prompt, sampling: Sampling, n: int = 1, cache_salt: str = ""
) -> list[Answer]:
    """One answer a choice; each index once, and exactly one end."""
    answers = [Answer() for _ in range(n)]
    async for chunk in client.generate(prompt, sampling, n=n, cache_salt=cache_salt):
        answer = answers[chunk.choice]
        assert answer.completion is None, "something came after the end"
        if chunk.token_ids:
            assert chunk.index == len(answer.token_ids), "an index is missing or repeated"
        answer.token_ids += chunk.token_ids
        answer.text += chunk.text
        answer.logprobs += chunk.logprobs
        answer.prompt_logprobs += chunk.prompt_logprobs
        answer.completion = chunk.complete
    for answer in answers:
        assert answer.complete.usage.output_tokens == len(answer.token_ids)
    return answers


async def answer_of(
    client: BatonClient, prompt: Prompt, sampling: Sampling, cache_salt: str = ""
) -> Answer:
    (answer,) = await answers_of(client, prompt, sampling, cache_salt=cache_salt)
    return answer


def params_of(sampling: Sampling) -> SamplingParams:
    """What the gateway makes of it for a model without eos ids and defaults of its own."""
    names = (
        "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
        "frequency_penalty", "presence_penalty", "logprobs", "prompt_logprobs", "seed",
    )  # fmt: skip
    given = {name: getattr(sampling, name) for name in names}
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        stop_token_ids=tuple(sampling.stop_token_ids),
        logit_bias=tuple(sorted((sampling.logit_bias or {}).items())),
    )


def assert_logprobs_equal(got: Sequence[TokenLogprobs], right: Sequence[TokenLogprobs]) -> None:
    """The same tokens with the same log-probabilities, within 1e-3 (I2)."""
    assert [entry.token_id for entry in got] == [entry.token_id for entry in right]
    for ours, theirs in zip(got, right, strict=True):
        assert ours.rank == theirs.rank
        assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]
        values = [ours.logprob, *(value for _, value in ours.top)]
        assert values == pytest.approx(
            [theirs.logprob, *(value for _, value in theirs.top)], abs=1e-3
        )
