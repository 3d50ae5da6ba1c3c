"""Runs a model on a GPU with up to two steps under way: `DeviceRunner`.

The life of a step, none of which waits for the device before ``collect``:

1. ``launch`` packs ids, positions and slots of all rows into one tensor and sends it over. An
   ``IN_FLIGHT`` id is read on the device, from where the launch before left it.
2. A step of decodes alone replays a captured graph (engine/cuda_graphs.py); others run eagerly.
3. The sampler chooses ids on the device and starts to read them back.
4. ``collect`` waits for the ids, the step's only wait, and for the flags of rows in mid-prompt.

Prompt log-probabilities are the exception: a row that asks for them is scored during launch.
On a CPU (tests, with kernels in Triton's interpreter) the same code runs without a device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.types import SequenceId
from engine.batch import IN_FLIGHT, Batch, RowResult, sample_requests
from engine.cuda_graphs import DecodeGraphs, DecodeInputs
from engine.kernels import SampledRows
from engine.kernels.span import Span
from engine.kv_cache import KVCache
from engine.model_runner import LiveRow, TorchRunner, are_ids
from engine.models.llama import LlamaModel
from engine.readback import Readback, to_device
from engine.sampler import NOT_FINITE, fill


class LaunchedStep:
    """A step under way; ``results`` are complete once it is collected."""

    def __init__(self, results: list[RowResult]) -> None:
        self.results = results
        self.sampling: list[LiveRow] = []
        self.sampled: SampledRows | None = None
        self.chunks: list[LiveRow] = []
        self.chunks_finite: Readback | None = None

    def collect(self) -> list[RowResult]:
        if self.sampled is not None:
            sampled = iter(self.sampled.collect())
            for row in self.sampling:
                fill(row.result, [next(sampled) for _ in row.sampled_indices()])
        if self.chunks_finite is not None:
            for row, finite in zip(self.chunks, self.chunks_finite.wait().tolist(), strict=True):
                if not finite:
                    row.result.error = NOT_FINITE
        return self.results


class DeviceRunner(TorchRunner):
    def __init__(
        self, model: LlamaModel, cache: KVCache, graphs: DecodeGraphs | None = None
    ) -> None:
        super().__init__(model, cache)
        self._graphs = graphs
        # Where the launch before put the id that each sequence goes on with.
        self._sampled_ids: Tensor | None = None
        self._sampled_at: dict[SequenceId, int] = {}

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        step = LaunchedStep([RowResult() for _ in batch.rows])
        live = self._live_rows(batch, step.results)
        if live:
            hidden = self._forward(live)
            self._check_chunks(live, hidden, step)
            self._score_prompts(live, hidden)
            self._start_sampling(live, hidden, step)
        return step

    def _live_rows(self, batch: Batch, results: list[RowResult]) -> list[LiveRow]:
        live: list[LiveRow] = []
        first = 0
        for row, result in zip(batch.rows, results, strict=True):
            in_flight = row.token_ids[0] == IN_FLIGHT
            known = row.token_ids[1:] if in_flight else row.token_ids
            if in_flight and row.seq_id not in self._sampled_at:
                result.error = "the step before gave no token"
            elif known and not are_ids(known, self.vocab_size):
                result.error = "a token id is out of the vocabulary"
            else:
                span = Span(first, len(row.token_ids), row.start, row.block_ids)
                live.append(LiveRow(row, result, row.token_ids, span))
                first += span.num_new
        return live

    def _forward(self, live: Sequence[LiveRow]) -> Tensor:
        spans = [row.span for row in live]
        packed = to_device(self._pack(live), self._cache.device)
        token_ids, positions, slots = packed
        self._fill_in_flight(live, token_ids)
        if self._graphs is not None and all(span.num_new == 1 for span in spans):
            inputs = DecodeInputs(token_ids, positions, slots, spans)
            hidden = self._graphs.run(inputs)
            if hidden is not None:
                return hidden
        attention = self._kernels.attention(self._cache, spans)
        return self._model.forward(token_ids, positions, slots, self._cache, attention)

    def _pack(self, live: Sequence[LiveRow]) -> Tensor:
        """int64 ``[3, n]``: ids (0 for those in flight), positions, slots."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for row in live:
            span = row.span
            end = span.start + span.num_new
            token_ids += row.token_ids
            positions += range(span.start, end)
            slots += self._cache.slots(span.block_ids, span.start, end)
        return torch.tensor([token_ids, positions, slots])

    def _fill_in_flight(self, live: Sequence[LiveRow], token_ids: Tensor) -> None:
        rows = [row for row in live if row.token_ids[0] == IN_FLIGHT]
        if not rows:
            return
        assert self._sampled_ids is not None
        places = [
            [row.span.first for row in rows],
            [self._sampled_at[row.row.seq_id] for row in rows],
        ]
        target, source = to_device(torch.tensor(places), token_ids.device)
        token_ids.index_copy_(0, target, self._sampled_ids.index_select(0, source))

    def _check_chunks(self, live: Sequence[LiveRow], hidden: Tensor, step: LaunchedStep) -> None:
        """Chunks in mid-prompt have no logits to tell that their KV is worthless."""
        step.chunks = [row for row in live if row.row.sample is None]
        if step.chunks:
            sums = [hidden[row.span.first :][: row.span.num_new].sum() for row in step.chunks]
            step.chunks_finite = Readback(torch.stack(sums).isfinite())

    def _start_sampling(self, live: Sequence[LiveRow], hidden: Tensor, step: LaunchedStep) -> None:
        step.sampling = [row for row in live if row.row.sample is not None]
        requests = [
            request for row in step.sampling for request in sample_requests(row.row, row.token_ids)
        ]
        self._sampled_at = {}
        if not requests:
            return
        wanted = [index for row in step.sampling for index in row.sampled_indices()]
        if wanted != list(range(len(hidden))):
            hidden = hidden.index_select(0, to_device(torch.tensor(wanted), hidden.device))
        step.sampled = self._kernels.sample(self._model.logits(hidden), requests)
        self._sampled_ids = step.sampled.ids
        at = -1
        for row in step.sampling:
            at += len(row.sampled_indices())
            self._sampled_at[row.row.seq_id] = at
