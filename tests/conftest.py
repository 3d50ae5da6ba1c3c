"""What holds for the whole suite."""

import os

import pytest

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
