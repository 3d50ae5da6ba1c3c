"""CUDA graphs for decode: a step of few rows is hundreds of tiny launches, replayed as one.

The life of the graphs:

1. At start, for each padded batch size, largest first: an eager run, which compiles and warms up,
   then a capture over static inputs. All sizes share one memory pool, whose cost is reported.
2. A step of n decodes takes the smallest size that holds them, copies its inputs in front and pads
   the rest: context 0 (attention gives zeros), slot -1 (nothing is written), id and position 0.
3. Replay; hidden states of the first n rows are valid until the next replay.

How many splits attention uses depends on the captured size alone (`DecodeAttention`), never on
contexts. What captures and replays is a `GraphBackend`, so that all of this runs without a GPU.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels import GraphKernels
from engine.kernels.span import Span, block_tables
from engine.kv_cache import KVCache
from engine.models.llama import LlamaModel
from engine.readback import to_device

log = logging.getLogger(__name__)

NO_SLOT = -1
_SIZES_TO_8 = (1, 2, 4, 8)
_SIZE_STEP = 8


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Ids, positions and slots, int64 ``[n]`` on the device, and where the contexts lie."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class Captured:
    """``output`` is what ``compute`` gave, overwritten by each ``replay``."""

    replay: Callable[[], None]
    output: Tensor


class GraphBackend(Protocol):
    def capture(self, compute: Callable[[], Tensor]) -> Captured: ...

    def reserved_bytes(self) -> int:
        """Device memory that this process' allocator holds."""
        ...


class CudaBackend:
    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(self, compute: Callable[[], Tensor]) -> Captured:
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream())
            compute()  # compiles kernels and makes library handles, which a capture must not
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = compute()
        return Captured(graph.replay, output)

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved()


class DecodeGraphs:
    def __init__(
        self,
        model: LlamaModel,
        cache: KVCache,
        sizes: Sequence[int],
        max_model_len: int,
        backend: GraphBackend,
    ) -> None:
        """Captures at once. ``model.kernels`` must be `GraphKernels`."""
        assert isinstance(model.kernels, GraphKernels)
        self._model = model
        self._cache = cache
        self._kernels = model.kernels
        self._sizes = sorted(sizes)
        largest, device = self._sizes[-1], cache.device
        width = -(-max_model_len // cache.block_size)
        # ids, positions, slots
        self._inputs = torch.zeros((3, largest), dtype=torch.int64, device=device)
        self._contexts = torch.zeros(largest, dtype=torch.int32, device=device)
        self._tables = torch.zeros((largest, width), dtype=torch.int32, device=device)
        self._pad(0, largest)
        before = backend.reserved_bytes()
        with torch.inference_mode():
            self._captured = {
                size: backend.capture(partial(self._compute, size))
                for size in reversed(self._sizes)
            }
        self.memory_bytes = backend.reserved_bytes() - before
        log.info(
            "captured decode graphs of %d sizes up to %d rows: %.0f MiB",
            len(self._sizes),
            largest,
            self.memory_bytes / 2**20,
        )

    @torch.inference_mode()
    def run(self, inputs: DecodeInputs) -> Tensor | None:
        """Hidden states ``[n, hidden_size]``, until the next call; None: too many rows."""
        num_rows = len(inputs.spans)
        if num_rows > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        for buffer, given in zip(
            self._inputs, (inputs.token_ids, inputs.positions, inputs.slots), strict=True
        ):
            buffer[:num_rows].copy_(given)
        contexts = torch.tensor([span.context for span in inputs.spans], dtype=torch.int32)
        self._contexts[:num_rows].copy_(to_device(contexts, self._cache.device))
        tables = block_tables(inputs.spans, self._cache.block_size)
        target = self._tables[:num_rows, : tables.shape[1]]
        target.copy_(to_device(tables, self._cache.device))
        self._pad(num_rows, size)
        captured = self._captured[size]
        captured.replay()
        return captured.output[:num_rows]

    def _pad(self, start: int, end: int) -> None:
        self._inputs[:2, start:end] = 0
        self._inputs[2, start:end] = NO_SLOT
        self._contexts[start:end] = 0

    def _compute(self, size: int) -> Tensor:
        token_ids, positions, slots = self._inputs[:, :size]
        tables, contexts = self._tables[:size], self._contexts[:size]
        attention = self._kernels.decode_attention(self._cache, tables, contexts)
        return self._model.forward(token_ids, positions, slots, self._cache, attention)


def padded_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8 and then every eighth, the last of them ``max_num_seqs`` itself."""
    sizes = [*_SIZES_TO_8, *range(2 * _SIZE_STEP, max_num_seqs, _SIZE_STEP)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]
