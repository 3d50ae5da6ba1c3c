"""What a killed `baton up` leaves behind is swept by the next one; what a live run has is not."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from support.cluster import REPOSITORY, START_S, Cluster, baton_up
from support.oracle_requests import ask, make_cases

from common.client import BatonClient

FLAGS = ("--num-blocks", "64", "--model", "oracle")


@pytest_asyncio.fixture
async def live(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A run that goes on beside all others, its pools in the same folder."""
    folder = tmp_path / "live"
    folder.mkdir()
    async with baton_up(folder, flags=FLAGS) as cluster:
        yield cluster


async def kill_a_run(runtime: Path, pool_dir: Path) -> None:
    """Starts a whole Baton and kills it, `baton up` and all below, with SIGKILL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "up", "--json"),
        *("--grpc-port", "0", "--http-port", "0", *FLAGS),
        *("--pool-dir", str(pool_dir)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=REPOSITORY,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        start_new_session=True,
    )
    assert process.stdout is not None
    async with asyncio.timeout(START_S):
        assert await process.stdout.readline()
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    # The kernel kills the others (common/child.py).
    async with asyncio.timeout(5):
        while any(child.is_running() for child in children):
            await asyncio.sleep(0.02)


@pytest.mark.fault("F27")
async def test_the_next_run_sweeps_what_a_killed_one_left(live: Cluster, tmp_path: Path) -> None:
    others = {path: path.stat().st_ino for path in live.pool_dir.iterdir()}
    assert len(others) == 2
    runtime = tmp_path / "killed"
    runtime.mkdir()
    await kill_a_run(runtime, live.pool_dir)
    left = set(live.pool_dir.iterdir()) - others.keys()
    assert len(left) == 2 and len(list(runtime.glob("baton/run-*"))) == 1
    async with baton_up(runtime, flags=[*FLAGS, "--pool-dir", str(live.pool_dir)]) as cluster:
        # Its secrets went with the folder of the killed run.
        assert [path.parent for path in runtime.glob("baton/run-*/token")] == [
            cluster.state_file.parent
        ]
        there = set(live.pool_dir.iterdir())
        assert not left & there
        assert len(there - others.keys()) == 2
        for path, inode in others.items():
            assert path.stat().st_ino == inode
        for target in (live.grpc, cluster.grpc):
            async with BatonClient(target) as client:
                for case in make_cases(3, 2, prompt_tokens=(40, 60), max_tokens=(8, 8)):
                    (await ask(client, case)).assert_right()
    assert set(live.pool_dir.iterdir()) == others.keys()


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.fault("F27")
async def test_twenty_killed_runs_leave_no_more_than_one(live: Cluster, tmp_path: Path) -> None:
    others = set(live.pool_dir.iterdir())
    runtime = tmp_path / "killed"
    runtime.mkdir()
    for _ in range(20):
        await kill_a_run(runtime, live.pool_dir)
        assert len(set(live.pool_dir.iterdir()) - others) == 2
        assert len(list(runtime.glob("baton/run-*"))) == 1
    for path in set(live.pool_dir.iterdir()) - others:
        path.unlink()
    shutil.rmtree(runtime)
