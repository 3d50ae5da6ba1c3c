"""The tensor operations of the model side that exist more than once: one table of kernel sets.

``torch`` runs everywhere and is the truth that every other set is compared with; ``triton`` runs on
NVIDIA GPUs. Matrix products are not in the table (engine/kernels/linear.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import ClassVar, Protocol

from torch import Tensor

from common.errors import ConfigError
from engine.batch import SampleRequest
from engine.kernels.span import Span
from engine.kv_cache import KVCache
from engine.sampler import Sampled


class Attention(Protocol):
    """Attention of one step's new tokens, planned once and called once a layer."""

    def __call__(self, layer: int, queries: Tensor) -> Tensor:
        """Queries ``[n, num_heads, head_size]`` of all rows' new tokens, whose keys and values are
        in the cache already, to ``[n, num_heads * head_size]``."""
        ...


class Kernels(ABC):
    """One implementation of each operation. n is the number of a step's new tokens."""

    name: ClassVar[str]

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
    def sample(self, logits: Tensor, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """One token a row of fp32 ``logits`` ``[rows, vocab]``, as engine/sampler.py defines it."""


_KERNELS = {
    "torch": ("engine.kernels.torch_kernels", "TorchKernels"),
}


def kernel_set(name: str) -> Kernels:
    """The set called ``name``; ``auto`` is the best one here. Raises ConfigError."""
    if name == "auto":
        name = "torch"
    if name not in _KERNELS:
        raise ConfigError("kernels", f"{name} is not one of auto, {', '.join(_KERNELS)}")
    module, class_name = _KERNELS[name]
    kernels: Kernels = getattr(import_module(module), class_name)()
    return kernels
