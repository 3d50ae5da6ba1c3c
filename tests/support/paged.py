"""A model over its own small KV pool, stepped by hand: what tests of the model side drive."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.types import SamplingParams, SequenceId
from engine.batch import Batch, BatchRow, RowResult, SampleRequest
from engine.kernels import kernel_set
from engine.kernels.span import Span
from engine.kv_cache import KVCache
from engine.model_runner import TorchRunner
from engine.models.config import ModelConfig, read_entry
from engine.models.llama import load_model

GREEDY = SamplingParams(max_tokens=1000, seed=0, temperature=0.0)


@dataclass
class PagedSequence:
    """Token ids, of which the first ``computed`` have their KV in these blocks."""

    seq_id: SequenceId
    token_ids: list[int]
    block_ids: list[int]
    num_prompt: int
    computed: int = 0
    params: SamplingParams = field(default=GREEDY)


class PagedModel:
    """``poisoned``: the pool starts as NaN, so that a slot read before it is written shows."""

    def __init__(
        self,
        entry: Path,
        num_blocks: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kernels: str = "torch",
    ) -> None:
        device = torch.device("cpu")
        self.model = load_model(read_entry(entry), dtype, device, kernel_set(kernels))
        self.storage = make_storage(self.model.config, num_blocks, block_size, dtype)
        self.cache = KVCache(self.storage)
        self.runner = TorchRunner(self.model, self.cache)
        self.block_size = block_size
        self._free = list(range(1, num_blocks))
        random.Random(7).shuffle(self._free)
        self._num_sequences = 0

    def sequence(
        self, token_ids: Sequence[int], params: SamplingParams = GREEDY, room: int = 64
    ) -> PagedSequence:
        """A new sequence with blocks, in no order, for its ids and ``room`` more."""
        self._num_sequences += 1
        num_blocks = -(-(len(token_ids) + room) // self.block_size)
        blocks = [self._free.pop() for _ in range(num_blocks)]
        seq_id = SequenceId(self._num_sequences)
        return PagedSequence(seq_id, list(token_ids), blocks, len(token_ids), params=params)

    def logits(self, *chunks: tuple[PagedSequence, int]) -> list[torch.Tensor]:
        """One step: the next n tokens of each sequence; the logits at every one of them."""
        spans: list[Span] = []
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, num_new in chunks:
            start, end = sequence.computed, sequence.computed + num_new
            spans.append(Span(len(token_ids), num_new, start, sequence.block_ids))
            token_ids += sequence.token_ids[start:end]
            positions += range(start, end)
            slots += self.cache.slots(sequence.block_ids, start, end)
            sequence.computed = end
        with torch.inference_mode():
            hidden = self.model.forward(
                torch.tensor(token_ids),
                torch.tensor(positions),
                torch.tensor(slots),
                self.cache,
                self.model.kernels.attention(self.cache, spans),
            )
            return list(self.model.logits(hidden).split([num_new for _, num_new in chunks]))

    def step(self, *sequences: PagedSequence, chunk: int = 10**9) -> list[RowResult]:
        """One step of the runner, up to ``chunk`` pending tokens of each; keeps what it samples."""
        rows = [self.row(sequence, chunk) for sequence in sequences]
        results = self.runner.launch(Batch(0, rows)).collect()
        for sequence, row, result in zip(sequences, rows, results, strict=True):
            sequence.computed = row.start + len(row.token_ids)
            sequence.token_ids += result.token_ids
        return results

    def row(self, sequence: PagedSequence, chunk: int = 10**9) -> BatchRow:
        start = sequence.computed
        new = sequence.token_ids[start : start + chunk]
        end = start + len(new)
        request = SampleRequest(sequence.params, sequence.num_prompt, end, sequence.token_ids)
        sample = request if end == len(sequence.token_ids) else None
        return BatchRow(sequence.seq_id, new, start, sequence.block_ids, sample)

    def generate(self, sequence: PagedSequence, num_tokens: int, chunk: int = 10**9) -> list[int]:
        """Runs the sequence alone until it has that many output tokens."""
        while len(sequence.token_ids) < sequence.num_prompt + num_tokens:
            (result,) = self.step(sequence, chunk=chunk)
            if result.error is not None:
                raise AssertionError(result.error)
        return sequence.token_ids[sequence.num_prompt :]


def make_storage(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype
) -> torch.Tensor:
    shape = (num_blocks, config.num_layers, 2, block_size, config.num_kv_heads, config.head_size)
    return torch.full(shape, float("nan"), dtype=dtype)
