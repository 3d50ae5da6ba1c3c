"""The kernel set ``triton``: NVIDIA GPUs of compute capability 8.0 and newer; elsewhere only in
Triton's interpreter, which is for tests."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from common.errors import ConfigError
from engine.batch import SampleRequest
from engine.kernels import (
    Attention,
    GraphKernels,
    SampledRows,
    activation,
    blocks,
    norm,
    rotary_write,
)
from engine.kernels.device_sampler import sample_on_device
from engine.kernels.span import Span
from engine.kernels.triton_attention import DecodeAttention, TritonAttention
from engine.kernels.tuning import MAX_HEAD_SIZE
from engine.kv_cache import KVCache

MIN_CAPABILITY = (8, 0)
# Kernels read whole 16-byte words; a block of this multiple keeps every one of them aligned.
_BLOCK_ALIGNMENT_BYTES = 256
_INTERPRETED_PROCESSORS = 2


class TritonKernels(GraphKernels):
    """See `engine.kernels.Kernels`."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError where Triton cannot run on ``device``."""
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability < MIN_CAPABILITY:
                found = "{}.{}".format(*capability)
                raise ConfigError("kernels", f"triton needs compute capability 8.0, not {found}")
            properties = torch.cuda.get_device_properties(device)
            self._num_processors = properties.multi_processor_count
        elif triton.knobs.runtime.interpret:
            self._num_processors = _INTERPRETED_PROCESSORS
        else:
            raise ConfigError("kernels", f"triton needs device cuda, not {device.type}")

    def check(self, cache: KVCache) -> None:
        head_size = cache.layers[0].keys.shape[-1]
        if head_size > MAX_HEAD_SIZE or head_size % 8:
            raise ConfigError("kernels", f"triton has no kernels for heads of {head_size}")
        if cache.block_bytes % _BLOCK_ALIGNMENT_BYTES:
            raise ConfigError(
                "block_size", f"a block of {cache.block_bytes} bytes is no multiple of 256"
            )

    def attention(self, cache: KVCache, spans: Sequence[Span]) -> Attention:
        return TritonAttention(cache, spans, self._num_processors)

    def decode_attention(self, cache: KVCache, tables: Tensor, contexts: Tensor) -> Attention:
        return DecodeAttention(cache, tables, contexts, self._num_processors)

    def rotary_write(
        self,
        cache: KVCache,
        layer: int,
        slots: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        angles: tuple[Tensor, Tensor],
    ) -> Tensor:
        pool = cache.layers[layer]
        return rotary_write.rotary_write(pool, slots, cache.rows_per_block, heads, angles)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(residual, x, weight, eps)

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        return activation.silu_multiply(gate_up)

    def copy_blocks(
        self, source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor
    ) -> None:
        blocks.copy_blocks(source, source_ids, target, target_ids)

    def sample(self, logits: Tensor, requests: Sequence[SampleRequest]) -> SampledRows:
        return sample_on_device(logits, requests)
