"""Puts a model onto a GPU before its KV pool is there, and finds out how large that may be.

The life of a start: load the weights -> measure the largest step and the graphs over a scratch pool
-> divide the worker's share of the device (engine/memory_budget.py) -> the pool is allocated by
whoever hands it over -> capture the graphs for good -> the runner.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.errors import ConfigError
from common.types import SamplingParams, SequenceId
from engine.batch import Batch, BatchRow, SampleRequest
from engine.cuda_graphs import CudaBackend, DecodeGraphs, GraphBackend, padded_sizes
from engine.cuda_memory import CudaMemory
from engine.device_runner import DeviceRunner
from engine.kernels import GraphKernels, kernel_set
from engine.kv_cache import KVCache
from engine.memory_budget import DeviceMemory, MemoryUse, measure
from engine.models.config import read_entry
from engine.models.llama import LlamaModel, load_model

_SAMPLED = SamplingParams(max_tokens=1, seed=0, temperature=1.0)


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What the largest step and the graphs must hold."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    enforce_eager: bool = False


class LoadedModel:
    """A model whose weights are on the device. ``scratch`` is a pool for measuring alone."""

    def __init__(
        self, model: LlamaModel, scratch: KVCache, limits: DeviceLimits, memory: DeviceMemory
    ) -> None:
        self._model = model
        self._scratch: KVCache | None = scratch
        self._limits = limits
        self._memory = memory

    def measure(self, backend: GraphBackend | None = None) -> MemoryUse:
        """Once, before the pool is allocated: gives the scratch pool back. Raises ConfigError where
        the largest step does not fit."""
        scratch, self._scratch = self._scratch, None
        assert scratch is not None
        try:
            return measure(
                self._memory,
                scratch.num_bytes,
                lambda: self._largest_step(scratch),
                lambda: self._captured_bytes(scratch, backend),
            )
        except torch.cuda.OutOfMemoryError:
            num_tokens = self._limits.max_num_batched_tokens
            detail = f"a step of {num_tokens} tokens does not fit beside the model's weights"
            raise ConfigError("max_num_batched_tokens", detail) from None

    def runner(self, storage: Tensor, backend: GraphBackend | None = None) -> DeviceRunner:
        cache = KVCache(storage)
        return DeviceRunner(self._model, cache, self._graphs(cache, backend))

    def _largest_step(self, scratch: KVCache) -> None:
        """All tokens of a step, and as many sampled rows as it may have."""
        limits, size = self._limits, scratch.block_size
        num_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        share = limits.max_num_batched_tokens // num_rows
        rows = []
        for i in range(num_rows):
            # All rows write to the same blocks: what comes out is of no interest.
            ids = [0] * min(share, limits.max_model_len)
            sample = SampleRequest(_SAMPLED, len(ids), len(ids), [])
            rows.append(BatchRow(SequenceId(i), ids, 0, range(-(-len(ids) // size)), sample))
        DeviceRunner(self._model, scratch).launch(Batch(0, rows)).collect()

    def _captured_bytes(self, scratch: KVCache, backend: GraphBackend | None) -> int:
        graphs = self._graphs(scratch, backend)
        return 0 if graphs is None else graphs.memory_bytes

    def _graphs(self, cache: KVCache, backend: GraphBackend | None) -> DecodeGraphs | None:
        """None where a step must run eagerly: asked for, or because of plain torch."""
        limits = self._limits
        if limits.enforce_eager or not isinstance(self._model.kernels, GraphKernels):
            return None
        sizes = padded_sizes(limits.max_num_seqs)
        backend = backend or CudaBackend()
        return DecodeGraphs(self._model, cache, sizes, limits.max_model_len, backend)


def load_on_device(
    model_dir: Path, dtype_name: str, kernels: str, block_size: int, limits: DeviceLimits
) -> tuple[LoadedModel, CudaMemory]:
    """Raises ConfigError where there is no GPU or not enough of it, and ModelError."""
    if not torch.cuda.is_available():
        raise ConfigError("device", "this build of torch finds no GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    entry = read_entry(model_dir)
    dtype: torch.dtype = getattr(torch, dtype_name)
    config, memory = entry.config, CudaMemory(device)
    num_blocks = -(-limits.max_num_batched_tokens // block_size) + 1
    shape = (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_size)
    try:
        scratch = KVCache(torch.zeros(shape, dtype=dtype, device=device))
        model = load_model(entry, dtype, device, kernel_set(kernels, scratch))
    except torch.cuda.OutOfMemoryError:
        free = memory.free_bytes() >> 20
        raise ConfigError("model", f"its weights do not fit: {free} MiB are free") from None
    return LoadedModel(model, scratch, limits, memory), memory
