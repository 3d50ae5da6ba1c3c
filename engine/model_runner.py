"""Runs a real model for the engine: `TorchRunner`, the `ModelRunner` of engine/runner.py.

The life of a step:

1. ``launch`` puts the new tokens of all rows one after the other: ids, positions, cache slots. An
   ``IN_FLIGHT`` id is the one that the launch before sampled for this sequence.
2. One pass through the model; keys and values go into the pool through the block tables.
3. The head is computed for rows that sample, at their last 1 + num_draft_tokens positions, and for
   prompt log-probabilities, in slices, since those want it at every position of a chunk.
4. The sampler gives ids; a row whose logits are not finite gets an error, its mates do not notice.

On a CPU all of this happens inside ``launch`` and ``collect`` hands over what is there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.types import SequenceId, TokenId, TokenLogprobs
from engine.batch import IN_FLIGHT, Batch, BatchRow, RowResult, sample_requests
from engine.kernels.span import Span
from engine.kv_cache import KVCache
from engine.logprobs import token_logprobs
from engine.models.choice import choose_kernels, load
from engine.models.config import read_entry
from engine.models.model import Model
from engine.runner import StepHandle
from engine.sampler import NOT_FINITE, fill

# Positions whose prompt log-probabilities are made at once: 64 x 49,152 logits are 12 MiB.
_LOGPROBS_SLICE = 64


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """``dtype`` is torch's name of the activations' type, ``kernels`` auto or a kernel set."""

    dtype: str = "float32"
    device: str = "cpu"
    kernels: str = "auto"
    quantization: str = "none"


def build_runner(config: RunnerConfig, model_dir: Path, storage: Tensor) -> "TorchRunner":
    """Loads a prepared entry; ``storage`` is the KV pool. Raises ModelError, ConfigError."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    entry, cache = read_entry(model_dir), KVCache(storage)
    kernels = choose_kernels(config.kernels, entry.config, cache)
    device = torch.device(config.device)
    model = load(entry, kernels, dtype, device, config.quantization)
    return TorchRunner(model, cache)


class FinishedStep:
    """A step whose results are there already."""

    def __init__(self, results: list[RowResult]) -> None:
        self._results = results

    def collect(self) -> list[RowResult]:
        return self._results


class TorchRunner:
    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._kernels = model.kernels
        # What the last launch sampled: the next may name these tokens as IN_FLIGHT.
        self._in_flight: dict[SequenceId, TokenId] = {}

    @property
    def kernels_name(self) -> str:
        """Of the set that computes the steps."""
        return self._kernels.name

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    def first_layers(self, num_layers: int) -> "TorchRunner":
        """Runs only these layers of the model, on the same cache; at least 1, fewer than all."""
        assert 1 <= num_layers < self._model.config.num_layers
        return TorchRunner(self._model.first_layers(num_layers), self._cache)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> StepHandle:
        results = [RowResult() for _ in batch.rows]
        live: list[LiveRow] = []
        first, vocab_size = 0, self.vocab_size
        for row, result in zip(batch.rows, results, strict=True):
            token_ids = row.token_ids
            if token_ids[0] == IN_FLIGHT:
                token_ids = self._resolved(row)
            num_new = len(token_ids)
            if not are_ids(token_ids, vocab_size):
                # Also where the step before failed, so that nothing was in flight.
                result.error = "a token id is out of the vocabulary"
                continue
            span = Span(first, num_new, row.start, row.block_ids)
            live.append(LiveRow(row, result, token_ids, span))
            first += num_new
        if live:
            hidden = self._forward(live)
            _fail_not_finite(live, hidden)
            self._score_prompts(live, hidden)
            self._sample(live, hidden)
        self._in_flight = {
            row.seq_id: result.token_ids[-1]
            for row, result in zip(batch.rows, results, strict=True)
            if result.token_ids
        }
        return FinishedStep(results)

    def copy_block(self, source: int, target: int) -> None:
        self._cache.copy_block(source, target)

    def _resolved(self, row: BatchRow) -> Sequence[TokenId]:
        """The row's ids with IN_FLIGHT filled in, if its token came to be."""
        return [self._in_flight.get(row.seq_id, IN_FLIGHT), *row.token_ids[1:]]

    def _forward(self, live: Sequence["LiveRow"]) -> Tensor:
        """Hidden states ``[n, hidden_size]`` of all new tokens."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        size, stride = self._cache.block_size, self._cache.rows_per_block
        for row in live:
            span = row.span
            start = span.start
            token_ids += row.token_ids
            if span.num_new == 1:  # without calls: there are hundreds of these
                positions.append(start)
                slots.append(span.block_ids[start // size] * stride + start % size)
            else:
                positions += range(start, span.context)
                slots += self._cache.slots(span.block_ids, start, span.context)
        device = self._cache.device
        return self._model.forward(
            torch.tensor(token_ids, device=device),
            torch.tensor(positions, device=device),
            torch.tensor(slots, device=device),
            self._cache,
            self._kernels.attention(self._cache, [row.span for row in live]),
        )

    def _sample(self, live: Sequence["LiveRow"], hidden: Tensor) -> None:
        sampling = [row for row in live if row.row.sample is not None]
        requests = [one for row in sampling for one in sample_requests(row.row, row.token_ids)]
        if not requests:
            return
        wanted = [index for row in sampling for index in row.sampled_indices()]
        logits = self._model.logits(hidden[torch.tensor(wanted, device=hidden.device)])
        sampled = iter(self._kernels.sample(logits, requests).collect())
        for row in sampling:
            tokens = [next(sampled) for _ in row.sampled_indices()]
            if row.result.error is None:
                fill(row.result, tokens)

    def _score_prompts(self, live: Sequence["LiveRow"], hidden: Tensor) -> None:
        for row in live:
            request = row.row.prompt_logprobs
            if request is None:
                continue
            scored: list[TokenLogprobs] = []
            for start in range(0, len(request.target_ids), _LOGPROBS_SLICE):
                targets = request.target_ids[start : start + _LOGPROBS_SLICE]
                begin = row.span.first + start
                logits = self._model.logits(hidden[begin : begin + len(targets)])
                if not bool(logits.sum().isfinite()):
                    row.result.error = NOT_FINITE
                    break
                scored += [
                    token_logprobs(scores, target, request.num_top)
                    for scores, target in zip(logits.cpu().numpy(), targets, strict=True)
                ]
            row.result.prompt_logprobs = tuple(scored)


def are_ids(token_ids: Sequence[TokenId], vocab_size: int) -> bool:
    if len(token_ids) == 1:
        return 0 <= token_ids[0] < vocab_size
    return min(token_ids) >= 0 and max(token_ids) < vocab_size


def _fail_not_finite(live: Sequence["LiveRow"], hidden: Tensor) -> None:
    """Chunks in mid-prompt have no logits to tell that their KV is worthless."""
    for row in live:
        if row.row.sample is None:
            states = hidden[row.span.first : row.span.first + row.span.num_new]
            if not bool(states.sum().isfinite()):
                row.result.error = NOT_FINITE


@dataclass(slots=True)
class LiveRow:
    """A row under computation. One a sequence and step, so it is not frozen: that takes longer."""

    row: BatchRow
    result: RowResult
    token_ids: Sequence[TokenId]
    span: Span

    def sampled_indices(self) -> range:
        """Which of the step's tokens are followed by a sampled one."""
        end = self.span.first + self.span.num_new
        return range(end - 1 - self.row.num_draft_tokens, end)
