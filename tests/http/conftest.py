"""The cluster that several files of HTTP tests share."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.cluster import Cluster, baton_up


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def oracle(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One prefill and one decode worker with the oracle model, at 200 steps a second."""
    flags = ["--num-blocks", "64", "--max-model-len", "4096", "--step-delay-ms", "5"]
    limits = ["--max-message-bytes", "1MiB", "--http-read-timeout-s", "1", "--lease-s", "3"]
    async with baton_up(tmp_path_factory.mktemp("oracle"), flags=[*flags, *limits]) as cluster:
        yield cluster
