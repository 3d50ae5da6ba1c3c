"""Where a run keeps its files, and how others find it."""

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from cli.run_dir import RunDir, RunState, find_run
from common.errors import ConfigError, Unavailable


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "baton"


def state_of(run: RunDir, address: str = "127.0.0.1:1") -> RunState:
    return RunState(os.getpid(), "oracle", (address,), "127.0.0.1:2", str(run.token_file), ({},))


def test_everything_is_readable_by_its_owner_alone() -> None:
    run = RunDir()
    run.save(state_of(run))
    for path in (run.path.parent, run.path, *run.path.iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path
    assert len(run.token_file.read_text()) >= 32
    run.close()


def test_others_find_the_newest_run_while_it_lives() -> None:
    old, new = RunDir(), RunDir()
    old.save(state_of(old, "127.0.0.1:1"))
    new.save(state_of(new, "127.0.0.1:2"))
    os.utime(old.path / "state.json", (1, 1))
    assert find_run() == state_of(new, "127.0.0.1:2")
    new.close()
    assert find_run() == state_of(old, "127.0.0.1:1")
    old.close()
    with pytest.raises(ConfigError, match="--address"):
        find_run()


def test_several_runs_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = RunDir(), RunDir()
    one.save(state_of(one, "127.0.0.1:1"))
    find_run()
    assert capsys.readouterr().err == ""
    other.save(state_of(other, "127.0.0.1:2"))
    os.utime(one.path / "state.json", (1, 1))
    find_run()
    assert "2 runs here" in (said := capsys.readouterr().err) and "127.0.0.1:2" in said
    one.close()
    other.close()


def test_a_run_that_starts_is_said_to_be_starting() -> None:
    run, later = RunDir(), RunDir()
    run.save(replace(state_of(run), grpc=(), starting=True))
    with pytest.raises(Unavailable, match="still starting"):
        find_run()
    later.save(state_of(later, "127.0.0.1:2"))
    assert find_run().grpc == ("127.0.0.1:2",)
    run.close()
    later.close()


def test_a_killed_run_misleads_nobody_and_is_swept(runtime: Path) -> None:
    killed = runtime / "run-0123"
    killed.mkdir(parents=True, mode=0o700)
    runtime.chmod(0o700)
    (killed / "lock").write_text("")
    (killed / "state.json").write_text(json.dumps({"pid": 1}))
    with pytest.raises(ConfigError):
        find_run()
    RunDir().close()
    assert not killed.exists()


def test_a_folder_that_others_can_enter_is_refused(runtime: Path) -> None:
    runtime.mkdir(mode=0o755)
    runtime.chmod(0o755)
    with pytest.raises(ConfigError, match="yours alone"):
        RunDir()


def test_a_link_in_the_folders_place_is_refused(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "else").mkdir(mode=0o700)
    runtime.symlink_to(tmp_path / "else")
    with pytest.raises(ConfigError, match="yours alone"):
        RunDir()


def test_a_state_that_is_no_state_is_passed_over() -> None:
    run = RunDir()
    (run.path / "state.json").write_text("{}")
    with pytest.raises(ConfigError):
        find_run()
    assert stat.S_ISDIR(run.path.stat().st_mode)
    run.close()
