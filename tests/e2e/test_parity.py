"""Greedy ids of the whole pipeline against transformers', on the default model (I2)."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.answers import Answer, answer_of
from support.cluster import Cluster
from support.parity import Golden, ParityCheck, load_goldens

from common.client import BatonClient, Sampling

# One of each kind, none long: what the default run has time for.
QUICK = (
    "one-token", "capital-of-france", "code", "digits", "emoji", "chinese", "length-16",
    "length-17",
)  # fmt: skip
QUICK_TOKENS = 48


def shortened(golden: Golden, num_tokens: int) -> Golden:
    return replace(
        golden,
        token_ids=golden.token_ids[:num_tokens],
        second_ids=golden.second_ids[:num_tokens],
        best_scores=golden.best_scores[:num_tokens],
        second_scores=golden.second_scores[:num_tokens],
    )


async def generate(client: BatonClient, golden: Golden, start: int) -> Answer:
    """What follows the golden's first tokens. Greedy decoding knows no difference between prompt
    and output, so those are simply sent as prompt."""
    prompt_ids = [*golden.prompt_ids, *golden.token_ids[:start]]
    sampling = Sampling(max_tokens=golden.num_after(start), temperature=0.0, ignore_eos=True)
    answer = await answer_of(client, prompt_ids, sampling)
    assert answer.complete.attempts == 1
    return answer


async def compare(client: BatonClient, goldens: Sequence[Golden], at_once: bool) -> None:
    check = ParityCheck()

    async def one(golden: Golden) -> None:
        start: int | None = 0
        while start is not None:
            start = check.compare(golden, (await generate(client, golden, start)).token_ids, start)

    if at_once:
        await asyncio.gather(*map(one, goldens))
    else:
        for golden in goldens:
            await one(golden)
    check.finish()


async def moved_bytes(client: BatonClient) -> dict[str, dict[str, int]]:
    """By role and transport."""
    workers = (await client.list_workers()).workers
    assert len({worker.pid for worker in workers}) == len(workers) == 2
    return {worker.role: dict(worker.bytes_moved) for worker in workers}


@pytest.mark.timeout(300)
async def test_quick_goldens_one_by_one_and_all_at_once(smollm2: Cluster) -> None:
    goldens = [shortened(golden, QUICK_TOKENS) for golden in load_goldens(QUICK)]
    async with BatonClient(smollm2.grpc) as client:
        await compare(client, goldens, at_once=False)
        await compare(client, goldens, at_once=True)
        for by_transport in (await moved_bytes(client)).values():
            assert by_transport.keys() == {"shm"} and by_transport["shm"] > 0


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "all at once"])
async def test_all_goldens(smollm2: Cluster, at_once: bool) -> None:
    goldens = load_goldens()
    assert len(goldens) >= 24 and all(len(golden.token_ids) == 64 for golden in goldens)
    async with BatonClient(smollm2.grpc) as client:
        await compare(client, goldens, at_once)
