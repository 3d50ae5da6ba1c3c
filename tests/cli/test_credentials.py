"""`baton credentials`: what it writes is taken by those it is for, and is nobody else's."""

import json
import subprocess
from pathlib import Path

import pytest

from cli.credentials import credentials
from common.config import read_secret
from common.errors import ConfigError
from common.nats_permissions import ROLES
from common.nats_server import find_nats_server


def contents(directory: Path) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text() for path in files}


def test_everyone_has_his_own_and_the_server_knows_them(tmp_path: Path) -> None:
    credentials(tmp_path)
    made = contents(tmp_path)
    own = {f"{role}/{name}" for role in ROLES for name in ("token", "nats.json")}
    assert set(made) == {"nats/nats-server.conf", *own}
    assert len({made[f"{role}/token"] for role in ROLES}) == 1
    for role in ROLES:
        login = json.loads(read_secret(tmp_path / role / "nats.json", "nats_credentials_file"))
        assert login["user"] == role and login["password"] in made["nats/nats-server.conf"]
        others = [made[name] for name in made if name.startswith(tuple(set(ROLES) - {role}))]
        assert not any(login["password"] in text for text in others)
        assert (tmp_path / role).stat().st_mode & 0o777 == 0o700
    config = str(tmp_path / "nats/nats-server.conf")
    subprocess.run([find_nats_server(), "-t", "-c", config], check=True, capture_output=True)


def test_they_are_kept(tmp_path: Path) -> None:
    credentials(tmp_path)
    before = contents(tmp_path)
    credentials(tmp_path)
    assert contents(tmp_path) == before


def test_what_is_left_of_them_is_made_anew(tmp_path: Path) -> None:
    """Those of two runs do not fit each other."""
    credentials(tmp_path)
    before = contents(tmp_path)
    (tmp_path / "decode/token").unlink()
    credentials(tmp_path)
    after = contents(tmp_path)
    assert set(after) == set(before)
    assert not any(after[name] == before[name] for name in before)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="DIR: cannot write"):
        credentials(tmp_path / "file")
