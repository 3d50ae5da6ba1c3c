"""What transports ask of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch

from common.errors import ConfigError

if TYPE_CHECKING:
    from kv_transfer.dist.group import PairGroup

HANDLE_BYTES = 64


class Device(Protocol):
    """One GPU of this process, named across processes by its UUID: indices depend on what each
    process may see. Rows are uint8 ``[num_blocks, block_bytes]``.

    Used by one transfer thread, but for ``synchronize`` and ``make_group``, which any may call.
    """

    uuid: str
    index: int

    def allocate(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        """Zeroed rows in memory of their own (cudaMalloc), never in torch's caching allocator,
        whose expandable segments cannot be exported. Raises ConfigError where there is no room."""

    def free(self, rows: torch.Tensor) -> None:
        """Gives the memory of ``allocate`` back; peers must not read it any more. Idempotent."""

    def synchronize(self) -> None:
        """Waits until all that was given to the device so far is done and seen by its peers."""

    def export(self, rows: torch.Tensor) -> bytes:
        """The handle, `HANDLE_BYTES`, by which another process opens memory of ``allocate``."""

    def reaches(self, uuid: str) -> bool:
        """Whether this device can read the memory of that one, which this process must see."""

    def open(self, uuid: str, handle: bytes, num_blocks: int, block_bytes: int) -> torch.Tensor:
        """Rows of another process's memory on device ``uuid``. A handle must not be open twice.
        Raises PeerLost where it opens nothing (any more)."""

    def close(self, rows: torch.Tensor) -> None:
        """Ends what ``open`` began, once."""

    def copy_blocks(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
    ) -> None:
        """``target[target_ids[i]] = source[source_ids[i]]`` for all i by one launch, on a stream
        of the transfer's own. Returns when the copy is done."""

    def make_group(self, store: Any, rank: int) -> PairGroup:
        """One end of a two-rank NCCL group. Raises RuntimeError where the other does not join."""


def open_device(name: str) -> Device:
    """``name`` is torch's: "cuda", "cuda:1". Raises ConfigError where there is no such GPU."""
    if torch.device(name).type != "cuda":
        raise ConfigError("device", f"the KV pool must lie on a GPU for this transport, not {name}")
    if not torch.cuda.is_available():
        raise ConfigError("device", f"{name}: torch finds no GPU that it can use")
    device: Device = import_module("kv_transfer.cuda.torch_device").TorchDevice(name)
    return device
