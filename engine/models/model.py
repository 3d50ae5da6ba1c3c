"""What a runner needs of a model."""

from typing import Protocol

from torch import Tensor

from engine.kernels import Attention, Kernels
from engine.kv_cache import KVCache
from engine.models.config import ModelConfig


class Model(Protocol):
    """Computes hidden states and logits; keys and values go to the cache it is called with."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def kernels(self) -> Kernels: ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: KVCache,
        attention: Attention,
    ) -> Tensor:
        """Ids, positions and cache slots ``[n]`` to normed hidden states ``[n, hidden_size]``."""
        ...

    def first_layers(self, num_layers: int) -> "Model":
        """The model of these layers, norm and head; weights and KV are those of this one."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the given rows only: ``[m, hidden_size]`` to ``[m, vocab_size]``, fp32."""
        ...
