"""The embedded nats-server: private files, loopback only, no secret in argv, gone with us."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from common.errors import ConfigError
from common.nats_permissions import ROLES
from common.nats_server import NatsServer


def test_files_ports_and_command_line(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats") as server:
        process = psutil.Process(server.pid)
        listening = [c.laddr for c in process.net_connections("tcp") if c.status == "LISTEN"]
        assert [(a.ip, a.port) for a in listening] == [
            ("127.0.0.1", int(server.url.rpartition(":")[2]))
        ]
        passwords = set()
        for role in ROLES:
            path = server.credentials_file(role)
            assert path.stat().st_mode & 0o777 == 0o600
            passwords.add(json.loads(path.read_text())["password"])
        assert len(passwords) == len(ROLES)
        assert not any(secret in " ".join(process.cmdline()) for secret in passwords)
        config = tmp_path / "nats" / "nats-server.conf"
        assert config.stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "nats").stat().st_mode & 0o777 == 0o700
        for service in ("websocket", "mqtt", "leafnodes", "gateway {"):
            assert service not in config.read_text()
    assert not psutil.pid_exists(process.pid)


def test_the_same_port_after_a_kill(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats") as server:
        url, pid = server.url, server.pid
        server.kill()
        server.start()
        assert server.url == url and server.pid != pid


def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "one") as server:
        port = int(server.url.rpartition(":")[2])
        other = NatsServer(tmp_path / "other", port=port)
        with pytest.raises(ConfigError, match="did not start"):
            other.start()


def test_a_frozen_server_can_be_stopped(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats") as server:
        os.kill(server.pid, signal.SIGSTOP)
        begin = time.monotonic()
    assert time.monotonic() - begin < 5


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    script = f"""
        import time
        from pathlib import Path
        from common.nats_server import NatsServer
        server = NatsServer(Path({str(tmp_path / "nats")!r}))
        server.start()
        print(server.pid, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
