"""A model that computes nothing: the next id is the last one plus one. For measuring the rest.

It touches no KV, but its logits go through the real sampler.
"""

import torch

from common.types import KVLayout, SequenceId, TokenId
from engine.batch import IN_FLIGHT, Batch, BatchRow, RowResult, sample_requests
from engine.pace import Pace
from engine.sampler import fill, sample

VOCAB_SIZE = 1024
# So far above the other logits, which are 0, that no noise at a usual temperature changes it.
_PEAK = 64.0


def null_layout(block_size: int) -> KVLayout:
    return KVLayout(
        num_layers=1,
        block_size=block_size,
        num_kv_heads=1,
        head_size=4,
        dtype="float32",
        model_fingerprint="null",
    )


def next_id(token_id: TokenId) -> TokenId:
    return (token_id + 1) % VOCAB_SIZE


class _Step:
    def __init__(self, runner: "NullRunner", rows: list[BatchRow], end_s: float) -> None:
        self._runner = runner
        self._rows = rows
        self._end_s = end_s

    def collect(self) -> list[RowResult]:
        return self._runner.compute(self._rows, self._end_s)


class NullRunner:
    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        # Row i: the logits after token i.
        self._logits = torch.eye(VOCAB_SIZE).roll(1, dims=1) * _PEAK
        self._sampled: dict[SequenceId, TokenId] = {}

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def launch(self, batch: Batch) -> _Step:
        return _Step(self, batch.rows, self._pace.launch(batch.rows))

    def copy_block(self, source: int, target: int) -> None:
        """There is no KV to copy."""

    def compute(self, rows: list[BatchRow], end_s: float) -> list[RowResult]:
        last_ids: list[TokenId] = []
        requests = []
        for row in rows:
            if row.sample is not None:
                last_ids += [
                    self._sampled[row.seq_id] if last_id == IN_FLIGHT else last_id
                    for last_id in row.token_ids[-1 - row.num_draft_tokens :]
                ]
                requests += sample_requests(row, row.token_ids)
        logits = self._logits.index_select(0, torch.tensor(last_ids, dtype=torch.int64))
        sampled = iter(sample(logits, requests) if requests else ())
        self._sampled = {}
        results = []
        for row in rows:
            if row.sample is None:
                results.append(RowResult())
                continue
            result = RowResult()
            fill(result, [next(sampled) for _ in range(row.num_draft_tokens + 1)])
            if result.token_ids:
                self._sampled[row.seq_id] = result.token_ids[-1]
            results.append(result)
        self._pace.wait(end_s)
        return results
