"""Chats over two prefill and two decode workers on a made clock: the same ids by every path (I2),
and what prefix-aware routing saves."""

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass

import pytest
from sim import clock
from sim.cluster import VOCAB, Choices, make_cluster
from sim.network import Faults
from sim.schedule import check_node, until_idle, until_ready

from common.types import Role, SamplingParams, Usage
from engine.oracle import reference_ids
from gateway.gateway import Gateway
from gateway.request import Completed, Request

NUM_CHATS = 2
NUM_TURNS = 3


@dataclass(frozen=True)
class Turn:
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    usage: Usage


async def _ask(gateway: Gateway, request: Request) -> Turn:
    ids: list[int] = []
    async with aclosing(gateway.pipeline.generate(request, {})) as events:
        async for event in events:
            if isinstance(event, Completed):
                right = reference_ids(request.prompt_ids, request.params, VOCAB)
                assert ids == list(right), request.request_id
                return Turn(request.prompt_ids, tuple(ids), event.usage)
            ids += event.token_ids
    raise AssertionError("it has no end")


async def _chat(gateway: Gateway, number: int, num_turns: int, question: int) -> list[Turn]:
    """Every answer is part of the next prompt."""
    turns: list[Turn] = []
    prompt: tuple[int, ...] = ()
    for turn in range(num_turns):
        prompt += tuple((number * 31 + 7 * turn + 3 * i * i) % VOCAB for i in range(question))
        temperature = 0.8 if number % 2 else 0.0
        params = SamplingParams(max_tokens=10, seed=number, temperature=temperature)
        request = Request(f"c{number}t{turn}", "", prompt, params, timeout_s=100.0)
        turns.append(await _ask(gateway, request))
        prompt += turns[-1].output_ids
        await asyncio.sleep(0.2 + 0.1 * number)
    return turns


def chats(choices: Choices, num_chats: int = NUM_CHATS, question: int = 70) -> list[Turn]:
    async def run() -> list[Turn]:
        cluster = make_cluster(random.Random(5), Faults(), 400, check_node, choices)
        gateway = await cluster.start_gateway()
        try:
            for role in (Role.PREFILL, Role.DECODE) * 2:
                await cluster.start_worker(role)
            await until_ready(cluster)
            given = await asyncio.gather(
                *(_chat(gateway, number, NUM_TURNS, question) for number in range(num_chats))
            )
            await until_idle(cluster)
            assert not cluster.wrong
            return [turn for chat in given for turn in chat]
        finally:
            await cluster.close()

    return clock.run(run(), 1000.0)


@pytest.mark.parametrize("routing", ["auto", "load", "random"])
@pytest.mark.parametrize("where", ["prefill", "decode", "both"])
@pytest.mark.parametrize("chunk", [16, 64, 2048])
def test_every_path_gives_the_same_ids(chunk: int, where: str, routing: str) -> None:
    """``both``: short work on the decode worker, the rest on a prefill worker."""
    threshold = {"prefill": None, "decode": 9999, "both": 90}[where]
    turns = chats(
        Choices(
            routing=(routing,),  # type: ignore[arg-type]
            thresholds=(threshold,),
            local_prefill=("never" if where == "prefill" else "auto",),
            chunk_tokens=(chunk,),
        )
    )
    on_prefill = [turn.usage.prefill_computed + turn.usage.prefill_cached for turn in turns]
    if where == "prefill":
        assert on_prefill == [len(turn.prompt_ids) for turn in turns]
    elif where == "decode":
        assert not any(on_prefill)
    else:
        # First turns are short; the later ones only where their prefix is known to be cached.
        num_local = on_prefill.count(0)
        assert num_local > NUM_CHATS if routing == "auto" else num_local == NUM_CHATS
    for turn in turns:
        usage = turn.usage
        on_decode = usage.decode_computed + usage.decode_cached + usage.decode_transferred
        assert on_decode == len(turn.prompt_ids)


def test_prefix_aware_routing_computes_much_less_again() -> None:
    """Multi-turn chats: tokens that a prefill worker computed although some worker had them."""
    again = {}
    for routing in ("auto", "random"):
        choices = Choices((routing,), (None,), ("never",), (64,))  # type: ignore[arg-type]
        turns = chats(choices, num_chats=12, question=48)
        computed = sum(turn.usage.prefill_computed for turn in turns)
        # With one cache for all, only what is new in a turn is computed, in whole blocks.
        new = sum(turn.usage.prompt_tokens for turn in turns if turn.usage.prompt_tokens == 48)
        new += sum(58 for turn in turns if turn.usage.prompt_tokens > 48)
        again[routing] = computed - new
    print(again)
    assert again["auto"] <= 0.4 * again["random"]
