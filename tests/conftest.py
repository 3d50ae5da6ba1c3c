"""What holds for the whole suite."""

import os

import pytest

# Set before torch is imported anywhere: tests and the workers that they start share the cores.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run side by side (xdist), one process takes all tests of a file, which share
    what they started, and all that share the set-up with the real model."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        group = "smollm2" if "smollm2" in fixtures else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
