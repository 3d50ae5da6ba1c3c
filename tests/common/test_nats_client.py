"""NatsClient against a real nats-server."""

from pathlib import Path

import pytest
import uvloop

from common.nats_calls import read_credentials
from common.nats_client import NatsClient, dispose
from common.nats_server import NatsServer


@pytest.mark.parametrize("end", ["error", "close"])
def test_a_reset_with_something_to_send_ends_in_order(tmp_path: Path, end: str) -> None:
    """On uvloop, whose closed transports refuse to write."""

    async def reset(server: NatsServer) -> None:
        user, password = read_credentials(server.credentials_file("worker"))
        client = NatsClient()
        await client.connect(server.url, user=user, password=password, allow_reconnect=False)
        assert client._transport is not None
        client._pending, client._pending_data_size = [b"PING\r\n"], 6
        client._transport._io_writer.transport.abort()
        if end == "error":
            await client._process_op_err(ConnectionResetError())
        await dispose(client)
        assert client.is_closed

    with NatsServer(tmp_path / "nats", roles={"worker": {}}) as server:
        uvloop.run(reset(server))
