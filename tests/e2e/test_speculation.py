"""Speculation through the whole of Baton: right ids after the hand-off, usage, metrics, and off."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.cluster import Cluster, baton_up
from support.openai_http import COMPLETIONS, answers, http_client, post
from support.oracle_requests import ask_all, make_cases
from support.scrape import scrape

from common.client import BatonClient, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")
FLAGS = [
    *("--speculation", "ngram", "--fixed-k", "--num-speculative-tokens", "4"),
    # Ids are as good as random: one token is the longest that comes again.
    *("--prompt-lookup-min", "1", "--prompt-lookup-max", "2"),
    # So few blocks that sequences preempt each other.
    *("--num-blocks", "40", "--step-delay-ms", "2"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with baton_up(tmp_path_factory.mktemp("speculation"), flags=FLAGS) as cluster:
        yield cluster


async def test_many_requests_get_the_right_ids(cluster: Cluster) -> None:
    cases = make_cases(7, 12, (1, 120), (20, 90))
    async with BatonClient(cluster.grpc) as client:
        for answer in await ask_all(client, cases):
            answer.assert_right()
    (decode,) = cluster.of_role("decode")
    scraped = await asyncio.to_thread(scrape, decode.admin)
    drafted = scraped("vllm:spec_decode_num_draft_tokens_total")
    assert drafted > 50
    assert scraped("baton_spec_decode_reasons_total", reason="gain") > 10
    assert scraped("vllm:spec_decode_num_accepted_tokens_total") <= drafted
    await cluster.until_clean()


async def test_usage_tells_what_was_drafted_unless_it_is_off(cluster: Cluster) -> None:
    (case,) = make_cases(8, 1, (60, 60), (60, 60))
    async with BatonClient(cluster.grpc) as client:
        usages = []
        for speculate in (True, False):
            ids: list[int] = []
            async for chunk in client.generate(
                case.prompt_ids * 2, Sampling(max_tokens=60, temperature=0.0), speculate=speculate
            ):
                ids += chunk.token_ids
                if chunk.complete is not None:
                    usages.append((ids, chunk.complete.usage))
    (with_drafts, usage), (without, plain) = usages
    assert with_drafts == without
    assert usage.drafted > 0 == plain.drafted
    assert usage.output_tokens == plain.output_tokens == 60


async def test_http_may_switch_it_off(cluster: Cluster) -> None:
    body = {"prompt": [1, 2, 3] * 9, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    async with http_client(cluster.http) as client:
        got = [
            await post(client, COMPLETIONS, {**body, **extra})
            for extra in ({}, {"speculation": "off"})
        ]
        refused = await client.post(COMPLETIONS, json={**body, "speculation": "fast"})
    first, second = (answers([content])[0] for content in got)
    assert first.token_ids == second.token_ids
    assert first.finish_reason == "length"
    assert refused.status_code == 400
    assert "speculation" in refused.text
