"""Greedy ids of the default model against transformers', its KV handed over by tcp (I2)."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.cluster import Cluster, baton_up
from support.parity import load_goldens

from common.client import BatonClient
from tests.e2e.test_parity import compare

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    flags = ["--num-blocks", "512", "--transport", "tcp"]
    folder = tmp_path_factory.mktemp("tcp-parity")
    async with baton_up(folder, model="default", flags=flags) as cluster:
        yield cluster


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "all at once"])
async def test_all_goldens_over_tcp(cluster: Cluster, at_once: bool) -> None:
    async with BatonClient(cluster.grpc) as client:
        await compare(client, load_goldens(), at_once)
        for worker in (await client.list_workers()).workers:
            assert dict(worker.bytes_moved).keys() == {"tcp"} and worker.bytes_moved["tcp"] > 0
