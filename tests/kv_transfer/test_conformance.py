"""Every transport passes the same checks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from common import failpoints
from kv_transfer.memory import POOL_PREFIX
from tests.kv_transfer.conformance import CHECKS, CORRUPTION_CHECKS, Check

BACKENDS = ["loopback", "shm", "tcp"]


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    failpoints.arm("")
    assert not list(tmp_path.rglob(f"{POOL_PREFIX}*")), "a pool file was left behind"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", [*CHECKS, *CORRUPTION_CHECKS], ids=lambda check: check.__name__)
@pytest.mark.fault("F16", "F28")
async def test_conformance(backend: str, check: Check, tmp_path: Path) -> None:
    await check(backend, tmp_path)
