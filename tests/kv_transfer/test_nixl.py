"""NIXL with the real library, in host memory: what every transport must do."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import failpoints
from common.errors import PeerLost
from tests.kv_transfer.conformance import CHECKS, CORRUPTION_CHECKS, Check
from tests.kv_transfer.rig import moves, reached
from tests.kv_transfer.test_processes import EXPECTED, Exporter, importer

pytest.importorskip("nixl_cu12", reason="the extra baton[nixl] is not installed")


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    failpoints.arm("")


@pytest.mark.parametrize("check", [*CHECKS, *CORRUPTION_CHECKS], ids=lambda check: check.__name__)
async def test_conformance(check: Check, tmp_path: Path) -> None:
    await check("nixl", tmp_path)


@pytest.mark.full
async def test_what_a_frozen_peer_sends_later_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still from claim to copy, is given up, and goes on: the blocks that its bytes were
    asked for are others' by then. (UCX may end it, as it finds nobody to send to.)"""
    monkeypatch.setenv("UCX_TLS", "tcp")  # by which the exporter itself sends
    frozen = Exporter("nixl", tmp_path, lease_s=30.0)
    async with importer("nixl", tmp_path) as here:
        await here.imports.fetch(frozen.offer(1), moves({0: 9}))
        failpoints.arm("decode.after_claim=sleep:0.3")
        fetching = asyncio.create_task(
            here.imports.fetch(frozen.offer(*range(4)), moves({i: i for i in range(4)}))
        )
        await reached("decode.after_claim")
        frozen.signal(signal.SIGSTOP)
        with pytest.raises(PeerLost, match="no progress"):
            await fetching
        failpoints.arm("")
        here.pool.rows[:4] = 0xA5
        frozen.signal(signal.SIGCONT)
        other = Exporter("nixl", tmp_path, epoch=2)
        for target in (5, 6, 7):
            await here.imports.fetch(other.offer(target), moves({0: target}))
        assert (here.pool.rows[:4] == 0xA5).all()
        assert (here.pool.rows[5:8] == EXPECTED[5:8]).all()
    frozen.kill()
    assert other.leave() == 0
