"""The text does not depend on how a prompt is computed: in chunks of any size, on a prefill worker
or where it is decoded, on whichever worker routing chooses, anew or from the prefix cache (I2)."""

import asyncio
from pathlib import Path

import pytest
from support.answers import answer_of
from support.cluster import Cluster, baton_up
from support.oracle_requests import ask_all, make_cases
from support.parity import Golden, ParityCheck, load_goldens

from common.client import BatonClient, Sampling
from tests.e2e.test_parity import QUICK, QUICK_TOKENS, shortened

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("routing", ["auto", "load", "random"]),
    pytest.mark.parametrize("local_prefill", ["never", "always"], ids=["remote", "local"]),
    pytest.mark.parametrize("chunk", [16, 64, 2048]),
]


def flags_of(chunk: int, routing: str) -> list[str]:
    return [
        *("--num-blocks", "512", "--routing", routing),
        *("--max-num-batched-tokens", str(chunk)),
    ]


async def assert_computed(cluster: Cluster, local_prefill: str, chunk: int) -> None:
    """On the side that was to do it, and in no fewer steps than the chunks take."""
    computed = {"prefill": 0, "decode": 0}
    for worker in cluster.workers:
        engine = (await cluster.debug(worker, "statistics"))["engine"]
        assert engine["num_prefill_tokens"] <= chunk * engine["num_steps"]
        computed[worker.role] += engine["num_prefill_tokens"]
    (gateway,) = cluster.of_role("gateway")
    decisions = (await cluster.debug(gateway, "gateway"))["prefill_decisions"]
    assert decisions.keys() == {local_prefill}
    if local_prefill == "always":
        assert computed["decode"] > 1000 and not computed["prefill"]
    else:
        assert computed["prefill"] > 1000


async def test_oracle(tmp_path: Path, chunk: int, local_prefill: str, routing: str) -> None:
    """Twice each, so that the second time finds what the first left; one prompt is longer than
    the largest chunk."""
    flags = flags_of(chunk, routing)
    cases = [
        *make_cases(31, 16, prompt_tokens=(1, 300), max_tokens=(2, 20)),
        *make_cases(32, 1, prompt_tokens=(2100, 2100), max_tokens=(8, 8)),
    ]
    async with (
        baton_up(
            tmp_path, prefill=2, decode=2, local_prefill=local_prefill, flags=flags
        ) as cluster,
        BatonClient(cluster.grpc) as client,
    ):
        for _ in range(2):
            for answer in await ask_all(client, cases):
                answer.assert_right()
        await assert_computed(cluster, local_prefill, chunk)
        await cluster.until_clean()


async def test_smollm2(tmp_path: Path, chunk: int, local_prefill: str, routing: str) -> None:
    goldens = [shortened(golden, QUICK_TOKENS) for golden in load_goldens((*QUICK, "log-lines"))]
    async with (
        baton_up(
            tmp_path, prefill=2, decode=2, model="default", local_prefill=local_prefill,
            flags=flags_of(chunk, routing),
        ) as cluster,
        BatonClient(cluster.grpc) as client,
    ):  # fmt: skip
        check = ParityCheck()

        async def one(golden: Golden) -> None:
            start: int | None = 0
            while start is not None:
                prompt_ids = [*golden.prompt_ids, *golden.token_ids[:start]]
                sampling = Sampling(golden.num_after(start), temperature=0.0, ignore_eos=True)
                answer = await answer_of(client, prompt_ids, sampling)
                start = check.compare(golden, answer.token_ids, start)

        for _ in range(2):
            await asyncio.gather(*map(one, goldens))
        check.finish()
        await assert_computed(cluster, local_prefill, chunk)
        await cluster.until_clean()
