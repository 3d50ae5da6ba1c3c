"""What is said on a connection, in network byte order, and how long silence is borne."""

import struct

from kv_transfer.lease import LEASE_ID_BYTES, SECRET_BYTES

NAME = "tcp"
MAGIC = b"BTKV"
VERSION = 1
FIRST_FRAME = struct.Struct(f"!4sH{LEASE_ID_BYTES}s{SECRET_BYTES}s")
ANSWER = struct.Struct("!IQ")
ASK = struct.Struct("!II")

# A peer that sends nothing for so long is dead (timers of docs/design.md).
STALL_S = 3.0
