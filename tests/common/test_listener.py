"""A port that cannot be had is one line that names the setting, whoever was to listen there."""

import socket
from collections.abc import Iterator

import pytest
import uvicorn

from common import rpc
from common.errors import ConfigError
from common.listener import open_listener
from common.web import WebServer


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def message(port: int, flag: str) -> str:
    return f"^{flag.replace('-', '_')}: 127.0.0.1:{port} is taken; give another --{flag}"


def test_a_socket(taken: int) -> None:
    with pytest.raises(ConfigError, match=message(taken, "port")):
        open_listener("127.0.0.1", taken, "port")


async def test_grpc(taken: int) -> None:
    server = rpc.make_internal_server("t" * 32)
    with pytest.raises(ConfigError, match=message(taken, "grpc-port")):
        rpc.bind(server, "127.0.0.1", taken, setting="grpc_port")


async def test_http(taken: int) -> None:
    config = uvicorn.Config(lambda *_: None, lifespan="off")
    with pytest.raises(ConfigError, match=message(taken, "admin-port")):
        await WebServer(config, "127.0.0.1", taken, "admin_port").start()


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ConfigError, match=r"^port: cannot listen on 192\.0\.2\.1:0: Cannot assign"):
        open_listener("192.0.2.1", 0, "port")
