"""Prompts that decode workers compute themselves: role `both`, and where it is cheaper (I2)."""

from pathlib import Path

import pytest
from support.cluster import baton_up
from support.oracle_requests import ask, ask_all, make_cases
from support.parity import load_goldens

from common.client import BatonClient
from tests.e2e.test_parity import compare

CHUNK = ("--max-num-batched-tokens", "16")


@pytest.mark.parametrize("chunked", ["--enable-chunked-prefill", "--no-enable-chunked-prefill"])
@pytest.mark.full
async def test_one_process_for_both_phases(tmp_path: Path, chunked: str) -> None:
    flags = ["--colocated", "1", "--num-blocks", "128", chunked, *CHUNK]
    async with baton_up(tmp_path, prefill=0, decode=0, flags=flags) as cluster:
        (worker,) = cluster.workers
        cases = make_cases(4, 24, prompt_tokens=(1, 200), max_tokens=(1, 20))
        async with BatonClient(cluster.grpc) as client:
            for answer in await ask_all(client, cases):
                answer.assert_right()
                assert answer.completion is not None
                usage = answer.completion.usage
                assert usage.decode_computed + usage.decode_cached == usage.prompt_tokens
                assert usage.prefill_computed == usage.decode_transferred == 0
        statistics = await cluster.debug(worker, "statistics")
        assert statistics["engine"]["num_prefill_tokens"] > 0
        (gateway,) = cluster.of_role("gateway")
        decisions = (await cluster.debug(gateway, "gateway"))["prefill_decisions"]
        assert decisions == {"always": len(cases)}
        await cluster.until_clean()


async def test_short_work_stays_on_the_decode_worker(tmp_path: Path) -> None:
    """By the threshold, and with the reason counted. The longer ones are handed over."""
    flags = ["--num-blocks", "128", "--local-prefill-threshold", "40"]
    async with baton_up(tmp_path, local_prefill="auto", flags=flags) as cluster:
        short = make_cases(5, 4, prompt_tokens=(1, 40), max_tokens=(2, 9))
        long = make_cases(6, 4, prompt_tokens=(41, 99), max_tokens=(2, 9))
        async with BatonClient(cluster.grpc) as client:
            for case in (*short, *long):
                answer = await ask(client, case)
                answer.assert_right()
                assert answer.completion is not None
                assert bool(answer.completion.usage.prefill_computed) == (case in long)
        (gateway,) = cluster.of_role("gateway")
        decisions = (await cluster.debug(gateway, "gateway"))["prefill_decisions"]
        assert decisions == {"below_threshold": 4, "above_threshold": 4}
        await cluster.until_clean()


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_all_goldens_in_chunks_on_the_decode_worker(tmp_path: Path) -> None:
    flags = ["--num-blocks", "512", "--local-prefill-threshold", "100000", *CHUNK]
    async with (
        baton_up(tmp_path, model="default", local_prefill="auto", flags=flags) as cluster,
        BatonClient(cluster.grpc) as client,
    ):
        await compare(client, load_goldens(), at_once=True, where="decode")
