"""What holds for the whole suite."""

import os

from cli.kernel_cache import fill_kernel_cache, kernel_cache

# Set before torch is imported anywhere: tests and the workers that they start share the cores.
os.environ["OMP_NUM_THREADS"] = "1"
# Kernels take longer to compile than to test: once, into the cache that `baton up` uses too.
os.environ.update(kernel_cache())


def pytest_sessionstart() -> None:
    fill_kernel_cache()
