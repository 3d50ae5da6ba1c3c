"""What holds for the whole suite."""

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.cluster import Cluster, baton_up
from xdist.scheduler import LoadFileScheduling

from cli.kernel_cache import fill_kernel_cache, kernel_cache

# Set before torch is imported anywhere: tests and the workers that they start share the cores.
os.environ["OMP_NUM_THREADS"] = "1"
# Kernels take longer to compile than to test: once, into the cache that `baton up` uses too.
os.environ.update(kernel_cache())

# Files of the long suite that take minutes: begun last, they would leave one core idle.
_LONGEST = ("test_real_models.py", "test_combinations.py", "test_cancel.py", "test_sweep.py")


def pytest_sessionstart() -> None:
    fill_kernel_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (*_LONGEST, item.path.name).index(item.path.name))


# Files whose tests share clusters run in one process, or each process would start its own.
_SHARING = ("tests/http/", "tests/faults/test_abuse_")


class _SharingFilesTogether(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        together = (prefix for prefix in _SHARING if nodeid.startswith(prefix))
        return next(together, super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _SharingFilesTogether:
    return _SharingFilesTogether(config, log)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def smollm2(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One prefill and one decode worker with the default model. Only for tests that leave it as
    it was."""
    folder = tmp_path_factory.mktemp("smollm2")
    async with baton_up(folder, model="default", flags=["--num-blocks", "512"]) as cluster:
        yield cluster
