"""The real `Device`."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from common.errors import ConfigError, PeerLost
from kv_transfer.cuda import runtime
from kv_transfer.cuda.device import HANDLE_BYTES
from kv_transfer.cuda.nccl import NcclGroup
from kv_transfer.dist.group import PairGroup


class TorchDevice:
    """Raises ConfigError where torch has no Triton, whose kernel does the copies."""

    def __init__(self, name: str) -> None:
        index = torch.device(name).index
        self.index = torch.cuda.current_device() if index is None else index
        if self.index >= torch.cuda.device_count():
            raise ConfigError("device", f"{name}: there are {torch.cuda.device_count()} GPUs")
        self.uuid = _uuid(self.index)
        self._device = torch.device("cuda", self.index)
        self._stream = torch.cuda.Stream(self._device)
        # Of what is allocated or open here.
        self._addresses: set[int] = set()
        try:
            self._copy_kernel: Any = import_module("kv_transfer.cuda.copy_kernel")
        except ImportError:
            raise ConfigError("device", "KV pools on a GPU need the package triton") from None

    def allocate(self, num_blocks: int, block_bytes: int) -> torch.Tensor:
        try:
            with torch.cuda.device(self._device):
                address = runtime.malloc(num_blocks * block_bytes)
        except runtime.CudaError as error:
            if not error.is_out_of_memory:
                raise
            free, total = torch.cuda.mem_get_info(self._device)
            raise ConfigError(
                "num_blocks",
                f"a pool of {num_blocks * block_bytes} bytes does not fit: {free} of {total} bytes "
                f"of GPU {self.index} are free",
            ) from None
        return self._rows(address, num_blocks, block_bytes)

    def free(self, rows: torch.Tensor) -> None:
        address = rows.data_ptr()
        if address in self._addresses:
            self._addresses.remove(address)
            with torch.cuda.device(self._device):
                runtime.free(address)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def export(self, rows: torch.Tensor) -> bytes:
        with torch.cuda.device(self._device):
            return runtime.handle_of(rows.data_ptr())

    def reaches(self, uuid: str) -> bool:
        index = _index_of(uuid)
        if index is None:
            return False
        return index == self.index or torch.cuda.can_device_access_peer(self.index, index)

    def open(self, uuid: str, handle: bytes, num_blocks: int, block_bytes: int) -> torch.Tensor:
        if len(handle) != HANDLE_BYTES:
            raise PeerLost("the handle of a peer's pool is not one")
        try:
            with torch.cuda.device(self._device):
                address = runtime.open_handle(handle)
        except runtime.CudaError as error:
            raise PeerLost(f"the handle of a peer's pool opens nothing: {error}") from None
        return self._rows(address, num_blocks, block_bytes)

    def close(self, rows: torch.Tensor) -> None:
        self._addresses.remove(rows.data_ptr())
        with torch.cuda.device(self._device):
            runtime.close_handle(rows.data_ptr())

    def copy_blocks(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
    ) -> None:
        ids = torch.tensor([source_ids, target_ids], dtype=torch.int64).pin_memory()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            on_device = ids.to(self._device, non_blocking=True)
            self._copy_kernel.copy_blocks(source, target, on_device[0], on_device[1])
        self._stream.synchronize()

    def make_group(self, store: Any, rank: int) -> PairGroup:
        return NcclGroup(store, rank, self._device)

    def _rows(self, address: int, num_blocks: int, block_bytes: int) -> torch.Tensor:
        rows: torch.Tensor = torch.as_tensor(_Memory(address, num_blocks, block_bytes))
        assert rows.data_ptr() == address, "torch copied what it should only look at"
        self._addresses.add(address)
        return rows


class _Memory:
    """Tells torch of memory that is not its own, as numba's CUDA array interface, version 3."""

    def __init__(self, address: int, num_blocks: int, block_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_blocks, block_bytes),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _index_of(uuid: str) -> int | None:
    found = (index for index in range(torch.cuda.device_count()) if _uuid(index) == uuid)
    return next(found, None)
