"""What is said on the bell, in network byte order, and for how long silence is borne."""

import contextlib
import socket
import struct
from dataclasses import dataclass

from kv_transfer.lease import LEASE_ID_BYTES, SECRET_BYTES

MAGIC = b"BTKD"
GROUP_NAME_BYTES = 16
ASK = struct.Struct(f"!4s{LEASE_ID_BYTES}s{SECRET_BYTES}s")
# Number of blocks, bytes of a block, port of the store (0: the group stands), name of the group.
ANSWER = struct.Struct(f"!IQH{GROUP_NAME_BYTES}s")
DONE = b"\x01"

# A peer that is silent for so long is dead (timers of docs/design.md).
STALL_S = 3.0


@dataclass(frozen=True, slots=True)
class Answer:
    num_blocks: int
    block_bytes: int
    store_port: int
    group_name: bytes

    def pack(self) -> bytes:
        return ANSWER.pack(self.num_blocks, self.block_bytes, self.store_port, self.group_name)


def receive(bell: socket.socket, size: int) -> bytes:
    """``size`` bytes. Raises EOFError where the peer hung up, else OSError."""
    data = b""
    while len(data) < size:
        more = bell.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def hang_up(bell: socket.socket) -> None:
    """Wakes up whoever waits on it, at both ends; its thread closes it."""
    with contextlib.suppress(OSError):
        bell.shutdown(socket.SHUT_RDWR)
