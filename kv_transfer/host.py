"""Which machine this is, as far as sharing memory goes."""

import socket
from pathlib import Path

from kv_transfer.base import HostIdentity

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_host() -> HostIdentity:
    """``boot_id`` is the running kernel's, the same in all its containers; "" where there is none,
    which then shares memory with nobody."""
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:
        boot_id = ""
    return HostIdentity(boot_id, socket.gethostname())
