"""A stranger at the data port: raw connections, and what they hear."""

import asyncio
import contextlib
import socket

from kv_transfer.base import DistAddress, TcpAddress
from kv_transfer.lease import LeaseKey, LeaseVerdict
from kv_transfer.tcp import frames
from tests.kv_transfer.rig import Rig

OFFERED = [4, 5, 6, 7]
CLAIMED = [1, 3]


class Stranger:
    """A raw connection to the data port; everything blocks for at most ``patience_s``."""

    def __init__(
        self,
        address: TcpAddress | DistAddress,
        patience_s: float = 1.0,
        source_host: str = "127.0.0.1",
    ) -> None:
        self._socket = socket.create_connection(
            (address.host, address.port), patience_s, source_address=(source_host, 0)
        )

    def say(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def hear(self, size: int = 1 << 20) -> bytes:
        """What comes until the other end hangs up, ``size`` bytes, or patience is over."""
        heard = b""
        with contextlib.suppress(ConnectionResetError, TimeoutError):
            while len(heard) < size and (data := self._socket.recv(size - len(heard))):
                heard += data
        return heard

    def end(self) -> None:
        """It will say no more, and listens on."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


def address_of(rig: Rig) -> TcpAddress:
    (address,) = rig.exports.describe().addresses
    assert isinstance(address, TcpAddress)
    return address


async def claimed(rig: Rig) -> LeaseKey:
    key = LeaseKey.of(await rig.offer(OFFERED))
    assert rig.exports.claim(key, "d-1", CLAIMED, "tcp") is LeaseVerdict.OK
    return key


def frame_of(key: LeaseKey, **changes: bytes | int) -> bytes:
    fields = {"magic": frames.MAGIC, "version": frames.VERSION, "secret": key.secret, **changes}
    lease_id = changes.get("lease_id", bytes.fromhex(key.lease_id))
    return frames.FIRST_FRAME.pack(fields["magic"], fields["version"], lease_id, fields["secret"])


async def heard(rig: Rig, said: bytes, size: int = 1 << 20, end: bool = False) -> bytes:
    """What a stranger hears who says this, and with ``end`` makes clear that it is all."""

    def talk() -> bytes:
        stranger = Stranger(address_of(rig))
        with contextlib.closing(stranger):
            stranger.say(said)
            if end:
                stranger.end()
            return stranger.hear(size)

    return await asyncio.to_thread(talk)
