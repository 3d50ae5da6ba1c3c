"""Two hosts, as far as their networks go: namespaces of this machine, joined by one link.

The scenario itself (netns_scenario.py) runs inside of the first host's namespace, so that all that
it opens lies there; this file makes the namespaces and removes them.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.netns_scenario import ADDRESSES, LINK

SCENARIO = Path(__file__).with_name("netns_scenario.py")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces with a link between them, which bears the same name in both."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (iproute2)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    names = (f"baton-{os.getpid()}-a", f"baton-{os.getpid()}-b")
    try:
        _make(*names)
        yield names
    finally:
        for name in names:
            # Also what is left in it: the link goes with its namespace.
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)


def _make(first: str, second: str) -> None:
    try:
        _ip("netns", "add", first)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
    _ip("netns", "add", second)
    _ip("-n", first, "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", second)
    for name, address in zip((first, second), ADDRESSES, strict=True):
        _ip("-n", name, "address", "add", f"{address}/24", "dev", LINK)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", LINK, "up")


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("security", ["insecure", "tls"])
@pytest.mark.fault("F12")
def test_two_hosts_and_their_link_cut(
    hosts: tuple[str, str], security: str, tmp_path: Path
) -> None:
    command = [
        *("ip", "netns", "exec", hosts[0], sys.executable, "-m", "pytest", str(SCENARIO)),
        *("-q", "-s", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inside")),
    ]
    environment = {**os.environ, "NETNS_OTHER_HOST": hosts[1], "NETNS_LINK": security}
    inside = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    print(inside.stdout)
    assert inside.returncode == 0, inside.stdout[-6000:] + inside.stderr[-2000:]
