"""Attention of a step by the two paged kernels: one launch for decodes, one for all else."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.paged_decode import num_decode_splits, paged_decode
from engine.kernels.paged_prefill import PrefillPlan, paged_prefill
from engine.kernels.span import Span, block_tables
from engine.kernels.tuning import prefill_tuning
from engine.kv_cache import KVCache
from engine.readback import to_device


class DecodeAttention:
    """One new token each of m sequences, from tensors that may change between calls: what a
    captured graph replays. ``tables`` int32 ``[m, width]``, ``contexts`` int32 ``[m]``; a context
    of 0 is an empty row, which gives zeros."""

    def __init__(
        self,
        cache: KVCache,
        tables: Tensor,
        contexts: Tensor,
        num_processors: int,
        rows: Tensor | None = None,
    ) -> None:
        self._cache = cache
        self._tables = tables
        self._contexts = contexts
        self._rows = rows
        num_kv_heads = cache.layers[0].num_kv_heads
        self._num_splits = num_decode_splits(len(contexts), num_kv_heads, num_processors)

    def __call__(self, layer: int, queries: Tensor) -> Tensor:
        output = torch.empty_like(queries)
        self.write(layer, queries, output)
        return output.flatten(1)

    def write(self, layer: int, queries: Tensor, output: Tensor) -> None:
        paged_decode(
            queries,
            self._cache.layers[layer],
            self._tables,
            self._contexts,
            self._num_splits,
            self._rows,
            output,
        )


class TritonAttention:
    """See `engine.kernels.Attention`."""

    def __init__(self, cache: KVCache, spans: Sequence[Span], num_processors: int) -> None:
        self._cache = cache
        self._chunks = [span for span in spans if span.num_new > 1]
        self._plan: PrefillPlan | None = None
        singles = [span for span in spans if span.num_new == 1]
        self._decodes: DecodeAttention | None = None
        if singles:
            numbers = [[span.context, span.first] for span in singles]
            on_device = to_device(
                torch.tensor(numbers, dtype=torch.int32).t().contiguous(), cache.device
            )
            tables = to_device(block_tables(singles, cache.block_size), cache.device)
            self._decodes = DecodeAttention(
                cache, tables, on_device[0], num_processors, on_device[1]
            )

    def __call__(self, layer: int, queries: Tensor) -> Tensor:
        output = torch.empty_like(queries)
        if self._chunks:
            plan = self._plan = self._plan or self._plan_chunks(queries)
            paged_prefill(queries, self._cache.layers[layer], plan, output)
        if self._decodes is not None:
            self._decodes.write(layer, queries, output)
        return output.flatten(1)

    def _plan_chunks(self, queries: Tensor) -> PrefillPlan:
        _, num_heads, head_size = queries.shape
        group = num_heads // self._cache.layers[0].num_kv_heads
        block_m = prefill_tuning(head_size, queries.element_size(), queries.device).block_m
        return PrefillPlan.of(
            self._chunks, group, block_m, self._cache.block_size, self._cache.device
        )
