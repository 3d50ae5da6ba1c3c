"""Compatible or not paired: what two pools must have in common, and where a block lies.

A pool is ``num_blocks`` regions of ``layout.block_bytes`` bytes, one after the other without gaps:
block b is bytes ``[b * block_bytes, (b + 1) * block_bytes)`` of it, on every transport.
"""

from dataclasses import fields

from common.errors import LayoutMismatch, TransferError
from common.types import KVLayout

NO_CHECKSUM = "none"


def require_compatible(ours: KVLayout, theirs: KVLayout) -> None:
    """Raises LayoutMismatch naming the first field in which the peer's layout differs."""
    for field in fields(KVLayout):
        expected, actual = getattr(ours, field.name), getattr(theirs, field.name)
        if expected != actual:
            raise LayoutMismatch(field.name, str(expected), str(actual))


def pool_bytes(layout: KVLayout, num_blocks: int) -> int:
    return num_blocks * layout.block_bytes


def require_in_pool(block_id: int, num_blocks: int) -> None:
    """Raises TransferError for a block that a peer named outside a pool."""
    if not 0 <= block_id < num_blocks:
        raise TransferError(f"block {block_id} is outside a pool of {num_blocks}")
