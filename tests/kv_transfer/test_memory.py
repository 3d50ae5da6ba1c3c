"""Pool files: room, names, locks, and what dead owners leave."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from common.errors import ConfigError
from kv_transfer.memory import POOL_PREFIX, allocate_pool, pool_path, sweep_dead_pools
from tests.kv_transfer.rig import LAYOUT

ROOT = Path(__file__).parents[2]


def run(code: str, *prefix: str) -> subprocess.Popen[str]:
    """A child that talks to us on its pipes."""
    return _start(*prefix, sys.executable, "-c", textwrap.dedent(code))


def run_module(name: str, *flags: str) -> subprocess.Popen[str]:
    return _start(sys.executable, "-m", name, *flags)


def _start(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


OWNER = """
    import sys
    from pathlib import Path
    from kv_transfer.memory import allocate_pool
    from tests.kv_transfer.rig import LAYOUT
    pool = allocate_pool("shm", LAYOUT, 8, Path({folder!r}), "p-1", 5)
    print("ready", flush=True)
    sys.stdin.readline()
"""


def start_owner(folder: Path) -> subprocess.Popen[str]:
    owner = run(OWNER.format(folder=str(folder)))
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    return owner


def stop(child: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    child.send_signal(number)
    child.wait(10)
    assert child.stdout is not None and child.stdin is not None
    child.stdout.close()
    child.stdin.close()


def test_a_pool_is_zeroed_private_and_unlinked_at_close(tmp_path: Path) -> None:
    with allocate_pool("shm", LAYOUT, 8, tmp_path, "p-1", 0xAB) as pool:
        path = tmp_path / f"{POOL_PREFIX}p-1-ab"
        assert pool.path == path
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_size == 8 * LAYOUT.block_bytes == pool.rows.nbytes
        assert pool.tensor.shape == (8, *LAYOUT.block_shape)
        assert not pool.tensor.any()
        pool.tensor[3] = 1.5
        assert pool.rows[3].any() and not pool.rows[2].any()
    assert not path.exists()
    assert (pool.tensor[3] == 1.5).all(), "views must outlive the name"
    pool.close()


def test_a_plain_pool_has_no_file(tmp_path: Path) -> None:
    with allocate_pool("plain", LAYOUT, 8, tmp_path, "p-1", 1) as pool:
        assert pool.path is None
        assert pool.tensor.shape == (8, *LAYOUT.block_shape)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("worker_id", ["", "../p", "a/b", ".hidden", "p\0", "p" * 200, "ü"])
def test_a_worker_id_cannot_lead_out_of_the_folder(worker_id: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        pool_path(tmp_path, worker_id, 1)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pool_dir"):
        allocate_pool("shm", LAYOUT, 8, tmp_path / "missing", "p-1", 1)


def test_a_name_in_use_is_an_error(tmp_path: Path) -> None:
    with (
        allocate_pool("shm", LAYOUT, 8, tmp_path, "p-1", 1),
        pytest.raises(ConfigError, match="pool_dir"),
    ):
        allocate_pool("shm", LAYOUT, 8, tmp_path, "p-1", 1)


@pytest.mark.fault("F27")
def test_only_files_of_the_dead_are_swept(tmp_path: Path) -> None:
    with allocate_pool("shm", LAYOUT, 8, tmp_path, "p-2", 1) as living:
        owner = start_owner(tmp_path)
        (tmp_path / "other-file").touch()
        (tmp_path / f"{POOL_PREFIX}link").symlink_to(tmp_path / "other-file")
        assert sweep_dead_pools(tmp_path) == 0
        stop(owner)
        dead = pool_path(tmp_path, "p-1", 5)
        assert dead.exists(), "a killed owner cannot clean up"
        assert sweep_dead_pools(tmp_path) == 1
        assert not dead.exists()
        assert living.path is not None and living.path.exists()
        assert (tmp_path / "other-file").exists()


@pytest.mark.fault("F27")
def test_a_readers_death_leaves_the_pool(tmp_path: Path) -> None:
    owner = start_owner(tmp_path)
    reader = run(f"""
        import sys
        from pathlib import Path
        from kv_transfer.base import Peer, TransportSettings
        from kv_transfer.memory import allocate_pool
        from kv_transfer.shm import ShmImporter
        from tests.kv_transfer.rig import LAYOUT
        pool = allocate_pool("plain", LAYOUT, 8, Path(), "d-1", 1)
        importer = ShmImporter(pool, TransportSettings(pool_dir=Path({str(tmp_path)!r})))
        importer.connect(Peer("p-1", 5, LAYOUT, 8, ()))
        print("ready", flush=True)
        sys.stdin.readline()
    """)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "ready\n"
    stop(reader)
    path = pool_path(tmp_path, "p-1", 5)
    assert path.exists() and path.stat().st_size == 8 * LAYOUT.block_bytes
    assert sweep_dead_pools(tmp_path) == 0
    stop(owner)


@pytest.mark.fault("F26")
def test_a_full_tmpfs_is_an_error_at_start(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec "$@"'
    prefix = ("unshare", "-m", "sh", "-c", mount, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root, to mount a small tmpfs")
    child = run(
        f"""
        from pathlib import Path
        from common.errors import ConfigError
        from kv_transfer.memory import allocate_pool
        from tests.kv_transfer.rig import LAYOUT
        folder = Path({str(tmp_path)!r})
        try:
            allocate_pool("shm", LAYOUT, 4000, folder, "p-1", 1)
        except ConfigError as error:
            print(error.setting, len(list(folder.iterdir())))
        """,
        *prefix,
    )
    out, _ = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "pool_dir 0\n")
