"""Many conversations at once give the texts that each gives when it runs alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from support.answers import Answer, answer_of
from support.cluster import Cluster
from support.parity import Golden, ParityCheck

from common.client import BatonClient, Chat, Sampling
from common.types import FinishReason

TOPICS = (
    "rivers", "the moon", "bread", "chess", "volcanoes", "trains", "bees", "glass",
    "mountains", "music", "the sea", "winter", "maps", "horses", "paper", "clocks",
)  # fmt: skip
QUESTIONS = (
    "Tell me one fact about {topic}.",
    "Why is that so?",
    "Say it again in fewer words.",
    "Name something else about {topic}.",
)


@dataclass(frozen=True)
class Turn:
    """What the user was answered, and the two best scores of each token for the tie rule."""

    name: str
    answer: Answer

    def as_golden(self) -> Golden:
        tops = [entry.top for entry in self.answer.logprobs]
        return Golden(
            name=self.name,
            prompt_ids=[],
            token_ids=self.answer.token_ids,
            second_ids=[top[1][0] for top in tops],
            best_scores=[top[0][1] for top in tops],
            second_scores=[top[1][1] for top in tops],
        )


async def converse(client: BatonClient, topic: str, num_turns: int, max_tokens: int) -> list[Turn]:
    """Each answer is part of the next question's prompt."""
    messages: list[tuple[str, str]] = []
    turns = []
    for number, question in enumerate(QUESTIONS[:num_turns]):
        messages.append(("user", question.format(topic=topic)))
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, logprobs=2)
        answer = await answer_of(client, Chat(tuple(messages)), sampling)
        assert answer.text.strip()
        assert answer.complete.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        messages.append(("assistant", answer.text))
        turns.append(Turn(f"{topic}, turn {number + 1}", answer))
    return turns


def compare(check: ParityCheck, alone: Sequence[Turn], together: Sequence[Turn]) -> None:
    """Behind a tie a conversation is another one."""
    for right, got in zip(alone, together, strict=True):
        num_ties = len(check.ties)
        num_tokens = min(len(right.answer.token_ids), len(got.answer.token_ids))
        same = got.answer.token_ids[:num_tokens] == right.answer.token_ids[:num_tokens]
        if same:
            assert got.answer.token_ids == right.answer.token_ids
            assert got.answer.text == right.answer.text
            check.num_compared += num_tokens
            continue
        padding = [-1] * (len(right.answer.token_ids) - num_tokens)
        check.compare(right.as_golden(), [*got.answer.token_ids[:num_tokens], *padding])
        assert len(check.ties) > num_ties
        return


async def check_conversations(
    cluster: Cluster, topics: Sequence[str], num_turns: int, max_tokens: int
) -> None:
    async with BatonClient(cluster.grpc) as client:
        together = await asyncio.gather(
            *(converse(client, topic, num_turns, max_tokens) for topic in topics)
        )
        check = ParityCheck()
        for topic, turns in zip(topics, together, strict=True):
            compare(check, await converse(client, topic, num_turns, max_tokens), turns)
        check.finish()


@pytest.mark.timeout(240)
async def test_a_few_short_conversations(smollm2: Cluster) -> None:
    await check_conversations(smollm2, TOPICS[:4], num_turns=2, max_tokens=8)


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_sixteen_conversations_of_four_turns(smollm2: Cluster) -> None:
    await check_conversations(smollm2, TOPICS, num_turns=4, max_tokens=12)
