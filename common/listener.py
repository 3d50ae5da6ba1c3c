"""A listening TCP socket, or one line that says why there is none."""

import errno
import socket

from common.errors import ConfigError


def open_listener(host: str, port: int, setting: str) -> socket.socket:
    """On ``host:port`` (0: a free one). Raises ConfigError that names ``setting``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        address = host_port(host, port)
        if error.errno == errno.EADDRINUSE:
            flag = "--" + setting.replace("_", "-")
            why = f"{address} is taken; give another {flag}, 0 for a free one"
        else:
            why = f"cannot listen on {address}: {error.strerror}"
        raise ConfigError(setting, why) from None


def host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
