"""A GPU that is none: device memory is an mmap'd file, an IPC handle its name, NCCL is gloo.

Stands behind the real cuda_ipc and nccl transports (`kv_transfer.cuda.device.Device`) on a machine
without GPUs, so that two processes run the same code; cuda_ipc's copies are the interpreted kernel.
"""

import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import PeerLost
from engine.kernels.blocks import copy_blocks
from kv_transfer.dist.group import GlooGroup, PairGroup

_HANDLE_BYTES = 64


class FileDevice:
    def __init__(self, folder: Path, uuid: str = "FILE-0") -> None:
        self.uuid = uuid
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
        try:
            return self._map(handle.decode().strip(), num_blocks, block_bytes)
        except (OSError, ValueError):
            raise PeerLost("the handle of a peer's pool opens nothing") from None

    def close(self, rows: Tensor) -> None:
        """The mapping ends with its last view."""

    def copy_blocks(
        self, source: Tensor, target: Tensor, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> None:
        copy_blocks(source, torch.tensor(source_ids), target, torch.tensor(target_ids))

    def make_group(self, store: Any, rank: int) -> PairGroup:
        return GlooGroup(store, rank, "127.0.0.1")

    def _map(self, name: str, num_blocks: int, block_bytes: int) -> Tensor:
        fd = os.open(self._folder / name, os.O_RDWR)
        try:
            memory = mmap.mmap(fd, num_blocks * block_bytes)
        finally:
            os.close(fd)
        return torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, block_bytes)
