"""Memory of other processes, by ctypes on the CUDA runtime that torch has loaded already.

Torch has no public way to export memory of one's own without pickles, nor to allocate outside of
its caching allocator. Calls act on the thread's current device (CUDA Runtime API, sections "Device
Management" and "Memory Management").
"""

import ctypes
from functools import cache

import torch

from kv_transfer.cuda.device import HANDLE_BYTES

_OUT_OF_MEMORY = 2
_LAZY_ENABLE_PEER_ACCESS = 1


class CudaError(RuntimeError):
    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call} failed: CUDA error {code}")
        self.code = code

    @property
    def is_out_of_memory(self) -> bool:
        return self.code == _OUT_OF_MEMORY


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


def malloc(num_bytes: int) -> int:
    """Address of zeroed memory."""
    address = ctypes.c_void_p()
    _call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
    assert address.value is not None
    _call("cudaMemset", address, ctypes.c_int(0), ctypes.c_size_t(num_bytes))
    return address.value


def free(address: int) -> None:
    _call("cudaFree", ctypes.c_void_p(address))


def handle_of(address: int) -> bytes:
    handle = _Handle()
    _call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
    return bytes(handle.reserved)


def open_handle(handle: bytes) -> int:
    """Where the memory lies in this process."""
    address = ctypes.c_void_p()
    named = _Handle.from_buffer_copy(handle)
    flags = ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
    _call("cudaIpcOpenMemHandle", ctypes.byref(address), named, flags)
    assert address.value is not None
    return address.value


def close_handle(address: int) -> None:
    _call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))


@cache
def _library() -> ctypes.CDLL:
    major = (torch.version.cuda or "").partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}")


def _call(name: str, *arguments: object) -> None:
    code: int = getattr(_library(), name)(*arguments)
    if code:
        _library().cudaGetLastError()  # else the next call would report it again
        raise CudaError(name, code)
