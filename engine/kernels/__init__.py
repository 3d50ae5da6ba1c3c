"""The tensor operations of the model side that exist more than once: one table of kernel sets.

``torch`` runs everywhere and is the truth that every other set is compared with; ``triton`` runs on
NVIDIA GPUs. Matrix products are not in the table (engine/kernels/linear.py).
"""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.batch import SampleRequest
from engine.kernels.span import Span
from engine.kv_cache import KVCache
from engine.sampler import Sampled

log = logging.getLogger(__name__)

CPU = torch.device("cpu")

# How often this process serves with plain torch instead of the set that its device is for.
fallbacks: Counter[str] = Counter()


class Attention(Protocol):
    """Attention of one step's new tokens, planned once and called once a layer."""

    def __call__(self, layer: int, queries: Tensor) -> Tensor:
        """Queries ``[n, num_heads, head_size]`` of all rows' new tokens, whose keys and values are
        in the cache already, to ``[n, num_heads * head_size]``."""
        ...


class SampledRows(Protocol):
    """One token a row, perhaps still on its way to the host."""

    @property
    def ids(self) -> Tensor:
        """int64 ``[rows]`` where the logits were; of rows that fail, any ids."""
        ...

    def collect(self) -> list[Sampled]:
        """Waits for them; once."""
        ...


class Kernels(ABC):
    """One implementation of each operation. n is the number of a step's new tokens."""

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError where the set cannot run on ``device``."""

    @abstractmethod
    def check(self, cache: KVCache) -> None:
        """Raises ConfigError for a pool that the set cannot work on."""

    @abstractmethod
    def attention(self, cache: KVCache, spans: Sequence[Span]) -> Attention:
        """Plans a step: prefills, chunks behind a cached prefix, decodes, any mix of them."""

    @abstractmethod
    def rotary_write(
        self,
        cache: KVCache,
        layer: int,
        slots: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        angles: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Rotates ``heads``, queries ``[n, num_heads, head_size]`` and keys and values with
        num_kv_heads, by ``angles``, cosines and sines ``[n, 1, head_size]``; writes keys and values
        to their ``slots`` ``[n]`` and gives the queries back."""

    @abstractmethod
    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last axis, whose size is the weight's."""

    @abstractmethod
    def add_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """``residual + x`` ``[n, hidden_size]``, and the same normed."""

    @abstractmethod
    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """``[n, 2 * size]``, gate then up, to silu(gate) * up ``[n, size]``."""

    @abstractmethod
    def copy_blocks(
        self, source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor
    ) -> None:
        """Block ``source_ids[i]`` of one pool to block ``target_ids[i]`` of another, which may be
        the same where no block is both read and written. Pools are ``[num_blocks, ...]``, their
        blocks contiguous and of equal size. A gather has targets 0 .. n-1, a scatter sources."""

    @abstractmethod
    def sample(self, logits: Tensor, requests: Sequence[SampleRequest]) -> SampledRows:
        """One token a row of fp32 ``logits`` ``[rows, vocab]``, as engine/sampler.py defines it."""


class GraphKernels(Kernels):
    """A set whose launches can be captured in CUDA graphs."""

    @abstractmethod
    def decode_attention(self, cache: KVCache, tables: Tensor, contexts: Tensor) -> Attention:
        """One new token each of m sequences, from tensors that change between replays: ``tables``
        int32 ``[m, width]``, ``contexts`` int32 ``[m]``. Context 0 is an empty row: zeros."""


_KERNELS = {
    "torch": ("engine.kernels.torch_kernels", "TorchKernels"),
    "triton": ("engine.kernels.triton_kernels", "TritonKernels"),
}


def kernel_set(name: str, cache: KVCache | None = None) -> Kernels:
    """The set called ``name`` for the device and the shape of ``cache`` (None: any pool on a CPU).
    ``auto`` is triton on CUDA, or torch where triton cannot run, which is logged, and torch on a
    CPU. Raises ConfigError."""
    device = CPU if cache is None else cache.device
    if name == "auto":
        if device.type != "cuda":
            return kernel_set("torch", cache)
        try:
            return kernel_set("triton", cache)
        except ConfigError as error:
            log.warning("plain torch instead of Triton kernels: %s", error.message)
            fallbacks["triton"] += 1
            return kernel_set("torch", cache)
    if name not in _KERNELS:
        raise ConfigError("kernels", f"{name} is not one of auto, {', '.join(_KERNELS)}")
    module, class_name = _KERNELS[name]
    try:
        kernels: Kernels = getattr(import_module(module), class_name)(device)
    except ModuleNotFoundError as error:
        raise ConfigError("kernels", f"{name} needs {error.name}, which is not installed") from None
    if cache is not None:
        kernels.check(cache)
    return kernels
