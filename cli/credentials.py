"""`baton credentials`: the secrets of one deployment, each role's in a folder of its own.

::

    DIR/nats/nats-server.conf            users, their passwords and rights
    DIR/<gateway|prefill|decode>/token   the run's token, the same for all
    DIR/<gateway|prefill|decode>/nats.json   user and password of this role alone

Each process is given its role's folder and no other. `baton up` makes its own, without this.
"""

import json
import secrets
from pathlib import Path
from typing import Annotated

import typer

from cli.output import print_text
from cli.run_dir import write_private
from common.errors import ConfigError
from common.nats_permissions import ROLES
from common.nats_server import server_config

_SERVER_CONFIG = Path("nats/nats-server.conf")
# For health checks; on loopback, since it tells subjects and connections to anyone.
_MONITORING = 'http: "127.0.0.1:8222"\n'


def credentials(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="a folder of yours alone")],
) -> None:
    """Make the token and the NATS users of a deployment, unless they are there already."""
    missing = [path for path in _paths() if not (directory / path).is_file()]
    if not missing:
        print_text(f"the credentials in {directory} are kept\n")
        return
    try:
        _write(directory)
    except OSError as error:
        raise ConfigError("DIR", f"cannot write {error.filename}: {error.strerror}") from None
    print_text(f"new credentials are in {directory}; what runs with older ones must be restarted\n")


def _paths() -> list[Path]:
    own = [Path(role) / name for role in ROLES for name in ("token", "nats.json")]
    return [_SERVER_CONFIG, *own]


def _write(directory: Path) -> None:
    """All of them anew: those of two runs do not fit each other. The server's comes last, so that
    a run which was killed begins again."""
    token = secrets.token_urlsafe(32)
    passwords = {role: secrets.token_urlsafe(24) for role in ROLES}
    (directory / _SERVER_CONFIG).unlink(missing_ok=True)
    for path in _paths():
        (directory / path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for role, password in passwords.items():
        write_private(directory / role / "token", token)
        login = json.dumps({"user": role, "password": password})
        write_private(directory / role / "nats.json", login)
    config = server_config("0.0.0.0:4222", "/tmp/jetstream", passwords)
    write_private(directory / _SERVER_CONFIG, config + _MONITORING)
