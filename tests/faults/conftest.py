"""The cluster that the abuse tests share, and what a test of refusals is wrapped in."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from faults.keys import API_KEYS
from support.cluster import Cluster, baton_up

FLAGS = [
    *("--num-blocks", "64", "--max-model-len", "4096", "--step-delay-ms", "3", "--lease-s", "3"),
    *("--max-message-bytes", "1MiB", "--http-read-timeout-s", "2", "--http-max-connections", "64"),
]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One prefill and one decode worker on the oracle model, behind API keys of two tenants."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys.yaml"
    keys.write_text(API_KEYS)
    keys.chmod(0o600)
    async with baton_up(folder, flags=[*FLAGS, "--api-key-file", str(keys)]) as cluster:
        yield cluster
