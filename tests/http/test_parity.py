"""gRPC and HTTP stand on one pipeline: the same request has the same answer at both."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import pytest
from support.answers import Answer as GrpcAnswer
from support.answers import answers_of
from support.cluster import Cluster
from support.openai_http import CHAT, COMPLETIONS, answers, http_client, post, stream
from support.parity import load_goldens

from common.client import BatonClient, Chat, Prompt, Sampling

QUICK = ("one-token", "capital-of-france", "digits", "emoji", "chinese", "length-17")
QUICK_TOKENS = 12
QUESTION = (("user", "Say <|im_end|> and name a color."),)
TALK = (
    ("system", "You are brief."),
    ("user", "What is 2 + 2?"),
    ("assistant", "4"),
    ("user", "And plus 3?"),
)


@dataclass(frozen=True)
class Case:
    """One request, as both say it."""

    name: str
    prompt: Prompt
    sampling: Sampling
    n: int = 1

    @property
    def path(self) -> str:
        return CHAT if isinstance(self.prompt, Chat) else COMPLETIONS

    def body(self) -> dict[str, Any]:
        given = {k: getattr(self.sampling, k) for k in Sampling.__dataclass_fields__}
        body = {k: v for k, v in given.items() if v not in (None, ())}
        body |= {"n": self.n, "return_token_ids": True, "cache_salt": self.name}
        if isinstance(self.prompt, Chat):
            return body | {"messages": [{"role": r, "content": c} for r, c in self.prompt.messages]}
        return body | {"prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt)}


def golden_cases(num_tokens: int, names: tuple[str, ...] | None = None) -> list[Case]:
    greedy = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return [Case(g.name, g.prompt_ids, greedy) for g in load_goldens(names)]


def other_cases() -> list[Case]:
    short = Sampling(max_tokens=10, temperature=0.0)
    sampled = Sampling(max_tokens=8, temperature=0.9, top_p=0.9, top_k=50, seed=7)
    text = "The capital of France is"
    return [
        Case("text", text, short),
        Case("sampled", text, sampled, n=3),
        Case("seed above 2^63", text, replace(sampled, seed=(1 << 63) + 5)),
        Case("stop", text, replace(short, stop=("\n",))),
        Case("stop shown", text, replace(short, stop=("\n",), include_stop_str_in_output=True)),
        Case("stop id", text, replace(short, stop_token_ids=(30,))),
        Case("bias", text, replace(short, logit_bias={30: 5.0, 198: -100.0})),
        Case("penalties", text, replace(short, presence_penalty=1.0, repetition_penalty=1.2)),
        Case("minimum", text, replace(sampled, min_tokens=4, min_p=0.05, frequency_penalty=0.5)),
        Case("chat", Chat(QUESTION), short),
        Case("many turns", Chat(TALK), replace(sampled, max_tokens=6), n=2),
    ]


async def compare(client: BatonClient, http: httpx2.AsyncClient, case: Case) -> None:
    """gRPC, then HTTP whole, then HTTP streamed; each with a salt of its own, so that all of them
    compute their prompts."""
    wanted = await answers_of(client, case.prompt, case.sampling, case.n, f"grpc {case.name}")
    for way in ("whole", "streamed"):
        body = case.body() | {"cache_salt": f"{way} {case.name}"}
        if way == "whole":
            contents = [await post(http, case.path, body)]
        else:
            options = {"stream_options": {"include_usage": True}}
            contents = await stream(http, case.path, body | options)
        for ours, theirs in zip(answers(contents, case.n), wanted, strict=True):
            assert ours.token_ids == theirs.token_ids, f"{case.name} {way}"
            assert ours.text == theirs.text, f"{case.name} {way}"
            assert ours.finish_reason == theirs.complete.finish_reason.value
            assert_usage(ours.usage, wanted)


def assert_usage(usage: dict[str, Any] | None, wanted: list[GrpcAnswer]) -> None:
    assert usage is not None
    prompt_tokens = wanted[0].complete.usage.prompt_tokens
    output_tokens = sum(answer.complete.usage.output_tokens for answer in wanted)
    assert usage["prompt_tokens"] == prompt_tokens
    assert usage["completion_tokens"] == output_tokens
    assert usage["total_tokens"] == prompt_tokens + output_tokens


async def compare_all(cluster: Cluster, cases: list[Case]) -> None:
    async with BatonClient(cluster.grpc) as client, http_client(cluster.http) as http:
        await asyncio.gather(*(compare(client, http, case) for case in cases))
    await cluster.until_clean()


@pytest.mark.timeout(300)
async def test_same_answers(smollm2: Cluster) -> None:
    await compare_all(smollm2, [*golden_cases(QUICK_TOKENS, QUICK), *other_cases()])


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_same_answers_to_all_goldens(smollm2: Cluster) -> None:
    await compare_all(smollm2, golden_cases(64))
