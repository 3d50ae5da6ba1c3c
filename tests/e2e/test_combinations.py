"""The text does not depend on how a prompt is computed: in chunks of any size, on a prefill worker
or where it is decoded, on whichever worker routing chooses, anew or from the prefix cache (I2)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from support.answers import answer_of
from support.cluster import Cluster, Process, baton_up
from support.oracle_requests import ask_all, make_cases
from support.parity import Golden, ParityCheck, load_goldens

from common.client import BatonClient, Sampling
from tests.e2e.test_parity import QUICK, QUICK_TOKENS, shortened

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("local_prefill", ["never", "always"], ids=["remote", "local"]),
    pytest.mark.parametrize("chunk", [16, 64, 2048]),
]
ROUTING = ("auto", "load", "random")


@asynccontextmanager
async def deployment(
    tmp_path: Path, model: str, chunk: int, local_prefill: str
) -> AsyncIterator[tuple[Cluster, dict[str, Process]]]:
    """Two workers of each kind, and a gateway for each way of ROUTING."""
    flags = [
        *("--num-blocks", "512", "--max-num-batched-tokens", str(chunk)),
        *("--routing", ROUTING[0]),
    ]
    async with (
        baton_up(
            tmp_path, prefill=2, decode=2, model=model, local_prefill=local_prefill, flags=flags
        ) as cluster,
        AsyncExitStack() as stack,
    ):
        gateways = dict(zip(ROUTING, cluster.of_role("gateway"), strict=False))
        for routing in ROUTING[1:]:
            another = cluster.another("gateway", "--routing", routing)
            gateways[routing] = await stack.enter_async_context(another)
        yield cluster, gateways


async def prefill_tokens(cluster: Cluster, chunk: int) -> dict[str, int]:
    """Those that each pool has computed, in no fewer steps than the chunks take."""
    computed = {"prefill": 0, "decode": 0}
    for worker in cluster.workers:
        engine = (await cluster.debug(worker, "statistics"))["engine"]
        assert engine["num_prefill_tokens"] <= chunk * engine["num_steps"]
        computed[worker.role] += engine["num_prefill_tokens"]
    return computed


@asynccontextmanager
async def computes(
    cluster: Cluster, gateway: Process, local_prefill: str, chunk: int
) -> AsyncIterator[None]:
    """Checks that what runs inside is decided, and computed anew, on the side that is to do it."""
    before = await prefill_tokens(cluster, chunk)
    yield
    after = await prefill_tokens(cluster, chunk)
    statistics = await cluster.debug(gateway, "gateway")
    assert statistics["prefill_decisions"].keys() == {local_prefill}
    if local_prefill == "always":
        assert after["decode"] > before["decode"] + 1000 and not after["prefill"]
    else:
        assert after["prefill"] > before["prefill"] + 1000


async def test_oracle(tmp_path: Path, chunk: int, local_prefill: str) -> None:
    """Twice each, so that the second time finds what the first left; one prompt is longer than
    the largest chunk."""
    async with deployment(tmp_path, "oracle", chunk, local_prefill) as (cluster, gateways):
        for number, gateway in enumerate(gateways.values()):
            cases = [
                *make_cases(31 + number, 16, prompt_tokens=(1, 300), max_tokens=(2, 20)),
                *make_cases(41 + number, 1, prompt_tokens=(2100, 2100), max_tokens=(8, 8)),
            ]
            async with (
                BatonClient(gateway.grpc) as client,
                computes(cluster, gateway, local_prefill, chunk),
            ):
                for _ in range(2):
                    for answer in await ask_all(client, cases):
                        answer.assert_right()
        await cluster.until_clean(others=list(gateways.values())[1:])


async def test_smollm2(tmp_path: Path, chunk: int, local_prefill: str) -> None:
    goldens = [shortened(golden, QUICK_TOKENS) for golden in load_goldens((*QUICK, "log-lines"))]
    async with deployment(tmp_path, "default", chunk, local_prefill) as (cluster, gateways):
        check = ParityCheck()

        async def one(client: BatonClient, golden: Golden, cache_salt: str) -> None:
            start: int | None = 0
            while start is not None:
                prompt_ids = [*golden.prompt_ids, *golden.token_ids[:start]]
                sampling = Sampling(golden.num_after(start), temperature=0.0, ignore_eos=True)
                answer = await answer_of(client, prompt_ids, sampling, cache_salt)
                start = check.compare(golden, answer.token_ids, start)

        for routing, gateway in gateways.items():
            async with (
                BatonClient(gateway.grpc) as client,
                computes(cluster, gateway, local_prefill, chunk),
            ):
                # No way finds what another has cached.
                for _ in range(2):
                    await asyncio.gather(*(one(client, golden, routing) for golden in goldens))
        check.finish()
        await cluster.until_clean(others=list(gateways.values())[1:])
