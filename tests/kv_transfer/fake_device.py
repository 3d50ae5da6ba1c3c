"""A GPU for tests, in host memory, that fails where hardware would give garbage or die.

What compute writes is seen by peers only after `synchronize`; a handle opens memory that lives,
once; what was opened is closed once; copies read open memory and come as one launch a claim; NCCL
takes one rank a GPU. Memory is a file, so that another process can open it as a peer would.
"""

import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common.errors import PeerLost
from kv_transfer.cuda.device import HANDLE_BYTES
from kv_transfer.dist.group import GlooGroup, PairGroup

PREFIX = "device-memory-"


class FakeDevice:
    """``unreachable``: UUIDs that it cannot read. ``log``: what was done, in order."""

    def __init__(self, uuid: str, folder: Path, unreachable: Sequence[str] = ()) -> None:
        self.uuid = uuid
        self.index = 0
        self.log: list[str] = []
        self._folder = folder
        self._unreachable = unreachable
        # What compute sees, and what peers see of it.
        self._memory: torch.Tensor | None = None
        self._visible: torch.Tensor | None = None
        self._path: Path | None = None
        self._open: dict[int, tuple[bytes, torch.Tensor]] = {}
        self._is_exported = False

    def allocate(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        assert self._memory is None, "one pool a device is what transports need"
        self._path = self._folder / f"{PREFIX}{secrets.token_hex(16)}"
        self._path.write_bytes(bytes(num_blocks * block_bytes))
        self._visible = _map(self._path, num_blocks, block_bytes, writable=True)
        self._memory = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8)
        return self._memory

    def free(self, rows: torch.Tensor) -> None:
        if self._path is not None:
            self._path.unlink()
            self._path = None

    def synchronize(self) -> None:
        assert self._memory is not None and self._visible is not None
        self._visible.copy_(self._memory)
        self.log.append("synchronize")

    def export(self, rows: torch.Tensor) -> bytes:
        assert rows is self._memory and self._path is not None
        assert not self._is_exported, "exported twice in one epoch"
        self._is_exported = True
        return self._path.name.encode().ljust(HANDLE_BYTES, b"\0")

    def reaches(self, uuid: str) -> bool:
        return uuid not in self._unreachable

    def open(self, uuid: str, handle: bytes, num_blocks: int, block_bytes: int) -> torch.Tensor:
        assert handle not in (opened for opened, _ in self._open.values()), "opened twice"
        try:
            rows = _map(self._folder / handle.rstrip(b"\0").decode(), num_blocks, block_bytes)
        except (OSError, ValueError):
            raise PeerLost("the handle of a peer's pool opens nothing") from None
        self._open[rows.data_ptr()] = (handle, rows)
        self.log.append("open")
        return rows

    def close(self, rows: torch.Tensor) -> None:
        assert rows.data_ptr() in self._open, "closed twice, or never opened"
        del self._open[rows.data_ptr()]
        self.log.append("close")

    def copy_blocks(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
    ) -> None:
        assert source.data_ptr() in self._open or source is self._memory, "read after close"
        assert target is self._memory
        assert len(source_ids) == len(target_ids) == len(set(target_ids))
        target[list(target_ids)] = source[list(source_ids)]
        self.log.append(f"copy {len(source_ids)}")

    def make_group(self, store: Any, rank: int) -> PairGroup:
        store.set(f"gpu-{rank}", self.uuid)
        if store.get(f"gpu-{1 - rank}").decode() == self.uuid:
            raise RuntimeError("Duplicate GPU detected")
        return FakeNcclGroup(store, rank, self)

    def visible(self, row: torch.Tensor) -> torch.Tensor:
        """What peers see of one of the pool's rows."""
        assert self._memory is not None and self._visible is not None
        index = (row.data_ptr() - self._memory.data_ptr()) // self._memory.shape[1]
        return self._visible[index]

    def require_closed(self) -> None:
        assert not self._open, "a peer's memory is still open"


class FakeNcclGroup(GlooGroup):
    """Gloo in its place: all rows of a call at once, and what is sent is what peers see."""

    rows_at_once = 1 << 30

    def __init__(self, store: Any, rank: int, device: FakeDevice) -> None:
        super().__init__(store, rank, "127.0.0.1")
        self._device = device

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        self._device.log.append(f"send {len(rows)}")
        super().send([self._device.visible(row) for row in rows])


def _map(path: Path, num_blocks: int, block_bytes: int, writable: bool = False) -> torch.Tensor:
    fd = os.open(path, os.O_RDWR)
    try:
        # Private to a reader: torch knows no memory that cannot be written.
        flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
        memory = mmap.mmap(fd, num_blocks * block_bytes, flags=flags)
    finally:
        os.close(fd)
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, block_bytes)
