"""A GPU that is none: device memory is an mmap'd file, an IPC handle its name.

Stands behind the real cuda_ipc transport (`kv_transfer.cuda.device.Device`) on a machine without a
GPU, so that two processes run the same code; blocks are copied by the interpreted kernel.
"""

import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.kernels.blocks import copy_blocks

_HANDLE_BYTES = 64


class FileDevice:
    def __init__(self, folder: Path) -> None:
        self.uuid = "FILE-0"
        self.index = 0
        self._folder = folder
        self._names: dict[int, str] = {}

    def allocate(self, num_blocks: int, block_bytes: int) -> Tensor:
        name = secrets.token_hex(16)
        size = num_blocks * block_bytes
        with (self._folder / name).open("x+b") as file:
            file.truncate(size)
        rows = self._map(name, num_blocks, block_bytes)
        self._names[rows.data_ptr()] = name
        return rows

    def free(self, rows: Tensor) -> None:
        name = self._names.pop(rows.data_ptr(), None)
        if name is not None:
            (self._folder / name).unlink()

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def export(self, rows: Tensor) -> bytes:
        return self._names[rows.data_ptr()].encode().ljust(_HANDLE_BYTES)

    def reaches(self, uuid: str) -> bool:
        return uuid == self.uuid

    def open(self, uuid: str, handle: bytes, num_blocks: int, block_bytes: int) -> Tensor:
        return self._map(handle.decode().strip(), num_blocks, block_bytes)

    def close(self, rows: Tensor) -> None:
        """The mapping ends with its last view."""

    def copy_blocks(
        self, source: Tensor, target: Tensor, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> None:
        copy_blocks(source, torch.tensor(source_ids), target, torch.tensor(target_ids))

    def make_group(self, store: Any, rank: int) -> Any:
        raise RuntimeError("NCCL needs a GPU")

    def _map(self, name: str, num_blocks: int, block_bytes: int) -> Tensor:
        fd = os.open(self._folder / name, os.O_RDWR)
        try:
            memory = mmap.mmap(fd, num_blocks * block_bytes)
        finally:
            os.close(fd)
        return torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, block_bytes)
