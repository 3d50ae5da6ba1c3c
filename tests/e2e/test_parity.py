"""Greedy ids of the whole pipeline against transformers', on the default model (I2)."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.answers import answer_of
from support.cluster import Cluster
from support.parity import Golden, ParityCheck, load_goldens

from common.client import BatonClient, Sampling

# One of each kind, none long: what the default run has time for.
QUICK = (
    "one-token", "capital-of-france", "code", "digits", "emoji", "chinese", "length-16",
    "length-17",
)  # fmt: skip
QUICK_TOKENS = 24


def shortened(golden: Golden, num_tokens: int) -> Golden:
    return replace(
        golden,
        token_ids=golden.token_ids[:num_tokens],
        second_ids=golden.second_ids[:num_tokens],
        best_scores=golden.best_scores[:num_tokens],
        second_scores=golden.second_scores[:num_tokens],
    )


async def generate(
    client: BatonClient, golden: Golden, start: int, salt: str, where: str = "prefill"
) -> list[int]:
    """What follows the golden's first tokens. Greedy decoding knows no difference between prompt
    and output, so those are simply sent as prompt."""
    prompt_ids = [*golden.prompt_ids, *golden.token_ids[:start]]
    sampling = Sampling(max_tokens=golden.num_after(start), temperature=0.0, ignore_eos=True)
    answer = await answer_of(client, prompt_ids, sampling, salt)
    assert answer.complete.attempts == 1
    if start == 0:
        usage = answer.complete.usage
        if where == "prefill":
            assert usage.prefill_computed == usage.decode_transferred == len(prompt_ids)
        else:
            assert usage.decode_computed == len(prompt_ids) and not usage.prefill_computed
    return answer.token_ids


async def compare(
    client: BatonClient, goldens: Sequence[Golden], at_once: bool, where: str = "prefill"
) -> None:
    """Each prompt with a salt of its own, so that all of its KV is computed: on a prefill worker,
    and handed over, or on the decode worker."""
    check = ParityCheck()

    async def one(golden: Golden) -> None:
        start: int | None = 0
        salt = f"{golden.name} {len(golden.token_ids)} {at_once}"
        while start is not None:
            token_ids = await generate(client, golden, start, salt, where)
            start = check.compare(golden, token_ids, start)

    if at_once:
        await asyncio.gather(*map(one, goldens))
    else:
        for golden in goldens:
            await one(golden)
    check.finish()


async def assert_two_processes_and_shm(client: BatonClient) -> None:
    workers = (await client.list_workers()).workers
    assert sorted(worker.role for worker in workers) == ["decode", "prefill"]
    assert len({worker.pid for worker in workers}) == 2
    for worker in workers:
        assert dict(worker.bytes_moved).keys() == {"shm"} and worker.bytes_moved["shm"] > 0


@pytest.mark.timeout(300)
async def test_quick_goldens_one_by_one_and_all_at_once(smollm2: Cluster) -> None:
    goldens = [shortened(golden, QUICK_TOKENS) for golden in load_goldens(QUICK)]
    async with BatonClient(smollm2.grpc) as client:
        await compare(client, goldens, at_once=False)
        await compare(client, goldens, at_once=True)
        await assert_two_processes_and_shm(client)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "all at once"])
async def test_all_goldens(smollm2: Cluster, at_once: bool) -> None:
    goldens = load_goldens()
    assert len(goldens) >= 24 and all(len(golden.token_ids) == 64 for golden in goldens)
    async with BatonClient(smollm2.grpc) as client:
        await compare(client, goldens, at_once)
