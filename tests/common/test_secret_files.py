"""Who may read a secret: its owner, or the group of a file that root has put there."""

import os
from pathlib import Path

import pytest

from common.config import read_secret
from common.errors import ConfigError
from common.secret_files import is_exposed


def status(mode: int, uid: int) -> os.stat_result:
    return os.stat_result((0o100000 | mode, 0, 0, 1, uid, 0, 1, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "uid", "we", "exposed"),
    [
        (0o600, 1000, 1000, False),
        (0o400, 1000, 1000, False),
        (0o640, 1000, 1000, True),
        (0o604, 1000, 1000, True),
        (0o440, 0, 1000, False),
        (0o460, 0, 1000, True),
        (0o444, 0, 1000, True),
        (0o440, 0, 0, True),
        (0o440, 1001, 1000, True),
    ],
)
def test_who_may_read_it(
    mode: int, uid: int, we: int, exposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: we)
    assert is_exposed(status(mode, uid)) is exposed


def test_an_exposed_secret_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("secret")
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match=r"token_file: .* is readable by others; chmod 600 it"):
        read_secret(secret, "token_file")
