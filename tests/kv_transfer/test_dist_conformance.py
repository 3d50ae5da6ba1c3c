"""torch.distributed passes the checks of every transport: gloo as it is, nccl's control over a
device that tests bring."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from common import failpoints
from tests.kv_transfer.conformance import CHECKS, CORRUPTION_CHECKS, Check


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


@pytest.mark.parametrize("check", [*CHECKS, *CORRUPTION_CHECKS], ids=lambda check: check.__name__)
async def test_gloo(check: Check, tmp_path: Path) -> None:
    await check("gloo", tmp_path)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_nccl(check: Check, tmp_path: Path) -> None:
    await check("nccl", tmp_path)
