"""The tensor operations that exist more than once: one table, one name a kernel set.

``torch`` runs everywhere and is the truth that every other set is compared with.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from common.errors import ConfigError
from engine.kernels.attention import TorchAttention
from engine.kernels.span import Span
from engine.kv_cache import KVCache


class Attention(Protocol):
    """Attention of one step's new tokens, planned once and called once a layer."""

    def __call__(self, layer: int, queries: Tensor) -> Tensor:
        """Queries ``[n, num_heads, head_size]`` of all rows' new tokens, whose keys and values are
        in the cache already, to ``[n, num_heads * head_size]``."""
        ...


ATTENTION: dict[str, Callable[[KVCache, Sequence[Span]], Attention]] = {
    "torch": TorchAttention,
}


def attention_kernel(name: str) -> Callable[[KVCache, Sequence[Span]], Attention]:
    """The kernel set called ``name``; ``auto`` is the best one here. Raises ConfigError."""
    if name == "auto":
        return TorchAttention
    if name not in ATTENTION:
        raise ConfigError("kernels", f"{name} is not one of auto, {', '.join(ATTENTION)}")
    return ATTENTION[name]
