"""The kernel set ``numba``: whole steps compiled, for fp32 on a CPU (engine/models/compiled.py)."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import ConfigError
from engine.kernels.cpu.attention import CHUNK, NUM_SPAN_FIELDS
from engine.kernels.cpu.buffers import padded
from engine.kernels.span import Span
from engine.kernels.torch_kernels import TorchKernels
from engine.kv_cache import KVCache
from engine.models.config import ModelConfig

_WHOLE = 16


class NumbaKernels(TorchKernels):
    """Sampling is torch's; everything before it is one function of `CompiledModel`."""

    name = "numba"

    def __init__(self) -> None:
        super().__init__()
        self._tables: NDArray[np.int64] = np.zeros(1024, dtype=np.int64)

    def attention(self, cache: KVCache, spans: Sequence[Span]) -> "PlannedSpans":
        """Block tables of all spans, one after the other, in a buffer that is kept."""
        sizes = [-(-span.context // cache.block_size) for span in spans]
        if sum(sizes) > len(self._tables):
            self._tables = np.zeros(2 * sum(sizes), dtype=np.int64)
        begin = 0
        for span, size in zip(spans, sizes, strict=True):
            self._tables[begin : begin + size] = span.block_ids[:size]
            begin += size
        return PlannedSpans(spans, sizes, self._tables)


class PlannedSpans:
    """A step's rows as the compiled function reads them. It attends by itself."""

    def __init__(
        self, spans: Sequence[Span], sizes: Sequence[int], tables: NDArray[np.int64]
    ) -> None:
        self.spans = spans
        self.tables = tables
        self._sizes = sizes

    def arrays(self, copied_floats: int) -> tuple[NDArray[np.int64], int]:
        """``[rows, 5]`` (attention.py), and the floats that copies of chunks' contexts take, at
        ``copied_floats`` a token."""
        fields: list[tuple[int, ...]] = []
        begin = num_copied = 0
        for span, size in zip(self.spans, self._sizes, strict=True):
            fields.append((span.first, span.num_new, span.start, begin, num_copied))
            begin += size
            if span.num_new >= CHUNK:
                num_copied += padded(span.context) * copied_floats
        return np.array(fields, dtype=np.int64).reshape(-1, NUM_SPAN_FIELDS), num_copied

    def __call__(self, layer: int, queries: Tensor) -> Tensor:
        raise AssertionError("a compiled step attends by itself")


def check_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError where the compiled step cannot serve a model: vectors are of eight fp32
    and panels of sixteen."""
    if device.type != "cpu" or dtype != torch.float32:
        raise ConfigError("kernels", f"numba computes in float32 on a CPU, not {dtype} on {device}")
    for name in ("hidden_size", "intermediate_size", "head_size"):
        if getattr(config, name) % _WHOLE:
            size = getattr(config, name)
            raise ConfigError(
                "kernels", f"numba needs a multiple of {_WHOLE} as {name}, not {size}"
            )
