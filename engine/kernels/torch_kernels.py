"""The kernel set ``torch``: plain torch on any device, the truth of every other set."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.batch import SampleRequest
from engine.kernels import CPU, Attention, Kernels, SampledRows
from engine.kernels.attention import TorchAttention
from engine.kernels.span import Span
from engine.kv_cache import KVCache
from engine.sampler import Sampled, sample


class FinishedRows:
    """Sampled already."""

    def __init__(self, sampled: list[Sampled], device: torch.device) -> None:
        self._sampled = sampled
        self._device = device

    @property
    def ids(self) -> Tensor:
        ids = [max(0, sampled.token_id) for sampled in self._sampled]
        return torch.tensor(ids, device=self._device)

    def collect(self) -> list[Sampled]:
        return self._sampled


class TorchKernels(Kernels):
    """See `engine.kernels.Kernels`."""

    name = "torch"

    def __init__(self, device: torch.device = CPU) -> None:
        """Runs on any."""

    def check(self, cache: KVCache) -> None:
        """Takes any."""

    def attention(self, cache: KVCache, spans: Sequence[Span]) -> Attention:
        return TorchAttention(cache, spans)

    def rotary_write(
        self,
        cache: KVCache,
        layer: int,
        slots: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        angles: tuple[Tensor, Tensor],
    ) -> Tensor:
        queries, keys, values = heads
        cache.write(layer, slots, rotate(keys, *angles), values)
        return rotate(queries, *angles)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = residual + x
        return total, self.norm(total, weight, eps)

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def copy_blocks(
        self, source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor
    ) -> None:
        target.index_copy_(0, target_ids, source.index_select(0, source_ids))

    def sample(self, logits: Tensor, requests: Sequence[SampleRequest]) -> SampledRows:
        return FinishedRows(sample(logits, requests), logits.device)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotates ``[n, num_heads, head_size]`` by the angles of its n positions."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines
