"""Attention in plain torch, through the block table: prefill, chunks, decode, any mix of them.

Rows with several new tokens (prompts, chunks, drafts) are computed one by one. Rows with one new
token (decodes) are computed together where their contexts take about as many blocks, padded to the
longest with the null block. Every copy read from the pool is cut or cleared where the sequence
ends: what lies behind it is another sequence's past, and may not even be a number.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.span import Span
from engine.kv_cache import KVCache

NULL_BLOCK = 0


class TorchAttention:
    """See `engine.kernels.Attention`."""

    def __init__(self, cache: KVCache, spans: Sequence[Span]) -> None:
        self._cache = cache
        self._chunks = [_Chunk.plan(cache, span) for span in spans if span.num_new > 1]
        groups: dict[int, list[Span]] = defaultdict(list)
        for span in spans:
            if span.num_new == 1:
                groups[_num_blocks(cache, span).bit_length()].append(span)
        self._decodes = [_DecodeGroup.plan(cache, group) for group in groups.values()]

    def __call__(self, layer: int, queries: Tensor) -> Tensor:
        output = torch.empty_like(queries)
        for chunk in self._chunks:
            chunk.attend(self._cache, layer, queries, output)
        for group in self._decodes:
            group.attend(self._cache, layer, queries, output)
        return output.flatten(1)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """New tokens of one sequence, n of them, after a context of c tokens in all."""

    tokens: slice
    context: int
    runs: Tensor
    mask: Tensor | None  # [n, c], 0 where a token may look, -inf elsewhere; None where n = c

    @classmethod
    def plan(cls, cache: KVCache, span: Span) -> "_Chunk":
        runs = cache.runs(span.block_ids[: _num_blocks(cache, span)])
        mask = None
        if span.start > 0:
            shape = (span.num_new, span.context)
            hidden = torch.ones(shape, dtype=torch.bool, device=cache.device).triu(span.start + 1)
            mask = _additive(hidden, cache)
        return cls(slice(span.first, span.first + span.num_new), span.context, runs, mask)

    def attend(self, cache: KVCache, layer: int, queries: Tensor, output: Tensor) -> None:
        keys, values = cache.read(layer, self.runs)
        attended = F.scaled_dot_product_attention(
            queries[self.tokens].transpose(0, 1)[None],  # [1, num_heads, n, head_size]
            keys[: self.context].transpose(0, 1)[None],  # [1, num_kv_heads, c, head_size]
            values[: self.context].transpose(0, 1)[None],
            attn_mask=self.mask,
            is_causal=self.mask is None,
            enable_gqa=True,
        )
        output[self.tokens] = attended[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """One new token each of m sequences, their contexts padded to c tokens (whole blocks)."""

    tokens: Tensor  # [m]
    runs: Tensor  # [m * c / block_size]
    mask: Tensor  # [m, 1, 1, c], 0 within the context, -inf behind it
    padding: Tensor  # token rows of the copy that lie behind a context

    @classmethod
    def plan(cls, cache: KVCache, spans: Sequence[Span]) -> "_DecodeGroup":
        width = max(_num_blocks(cache, span) for span in spans)
        table: list[int] = []
        for span in spans:
            blocks = list(span.block_ids[: _num_blocks(cache, span)])
            table += blocks + [NULL_BLOCK] * (width - len(blocks))
        contexts = torch.tensor([span.context for span in spans], device=cache.device)
        behind = torch.arange(width * cache.block_size, device=cache.device) >= contexts[:, None]
        return cls(
            tokens=torch.tensor([span.first for span in spans], device=cache.device),
            runs=cache.runs(table),
            mask=_additive(behind, cache)[:, None, None, :],
            padding=behind.flatten().nonzero().flatten(),
        )

    def attend(self, cache: KVCache, layer: int, queries: Tensor, output: Tensor) -> None:
        keys, values = cache.read(layer, self.runs)
        _, num_kv_heads, head_size = keys.shape
        keys.index_fill_(0, self.padding, 0)
        values.index_fill_(0, self.padding, 0)
        m = len(self.tokens)
        attended = F.scaled_dot_product_attention(
            # The queries that share a KV head stand as rows beside each other: nothing repeats it.
            queries[self.tokens].view(m, num_kv_heads, -1, head_size),
            keys.view(m, -1, num_kv_heads, head_size).transpose(1, 2),
            values.view(m, -1, num_kv_heads, head_size).transpose(1, 2),
            attn_mask=self.mask,
        )
        output[self.tokens] = attended.reshape(m, -1, head_size)


def _additive(hidden: Tensor, cache: KVCache) -> Tensor:
    """What is added to the scores so that ``hidden`` places count for nothing."""
    return torch.zeros_like(hidden, dtype=cache.dtype).masked_fill_(hidden, float("-inf"))


def _num_blocks(cache: KVCache, span: Span) -> int:
    return -(-span.context // cache.block_size)
