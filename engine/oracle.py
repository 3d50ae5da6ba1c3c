"""A model without weights whose text shows every mistake made with a KV block.

The KV of the token at position i is a pseudo-random function of (token id, i, layer) alone. The
logits of the next token are a pseudo-random function of a hash over all KV bytes before it, read
through the block table in logical order, and of i. So the text depends on the token ids alone as
long as every block is in its place, and a stale, foreign, missing, doubled or swapped block or
layer changes it. Freed blocks are poisoned (`OracleRunner.poison`, the pool's ``on_free``).

A step is computed when it is collected, as late as an asynchronous device might: a block given
back too early is then already poisoned. `reference_ids` says what the right text is, without any
pool or engine.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.types import KVLayout, SamplingParams, SequenceId, TokenId, TokenLogprobs
from engine.batch import IN_FLIGHT, Batch, BatchRow, RowResult, SampleRequest, sample_requests
from engine.logprobs import token_logprobs
from engine.pace import Pace
from engine.sampler import Sampled, fill, sample

Words = npt.NDArray[np.uint64]

NUM_LAYERS = 2
_NUM_KV_HEADS = 1
_HEAD_SIZE = 4
_WORD_BYTES = 8
# Keys and values of all layers of one token, in 64-bit words.
_WORDS_PER_TOKEN = NUM_LAYERS * 2 * _NUM_KV_HEADS * _HEAD_SIZE * 4 // _WORD_BYTES
_POISON = np.uint64(0xA5A5A5A5A5A5A5A5)
_LANES = np.arange(_WORDS_PER_TOKEN, dtype=np.uint64)
# Logits are uniform in [0, _LOGIT_RANGE): peaked enough that temperature matters.
_LOGIT_RANGE = 8.0


def oracle_layout(block_size: int) -> KVLayout:
    return KVLayout(
        num_layers=NUM_LAYERS,
        block_size=block_size,
        num_kv_heads=_NUM_KV_HEADS,
        head_size=_HEAD_SIZE,
        dtype="float32",
        model_fingerprint="oracle",
    )


# ---------------------------------------------------------------- the model


def _mix(values: Words) -> Words:
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014, figure 16); wraps modulo 2^64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = values ^ (values >> np.uint64(31))
    return mixed


def token_kv(token_ids: Sequence[TokenId], start: int) -> Words:
    """KV ``[n, num_layers * 2 * words]`` of n tokens, the first at position ``start``."""
    tokens = np.array(token_ids, dtype=np.uint64)
    positions = np.arange(start, start + len(token_ids), dtype=np.uint64)
    seeds = _mix(tokens << np.uint64(32) | positions)
    return _mix(seeds[:, None] + _LANES[None, :])


def _digest_seed(hasher: "hashlib._Hash", num_tokens: int) -> int:
    hasher.update(num_tokens.to_bytes(8, "little"))
    return int.from_bytes(hasher.digest()[:8], "little")


def _prefix_seeds(kv: Words, first: int, num_seeds: int) -> list[int]:
    """Seeds after ``first``, ``first + 1``, ... tokens of ``kv``."""
    hasher = hashlib.sha256(kv[:first].tobytes())
    seeds = [_digest_seed(hasher.copy(), first)]
    for num_tokens in range(first + 1, first + num_seeds):
        hasher.update(kv[num_tokens - 1].tobytes())
        seeds.append(_digest_seed(hasher.copy(), num_tokens))
    return seeds


def _logits(seeds: Sequence[int], vocab_size: int) -> npt.NDArray[np.float32]:
    """``[len(seeds), vocab_size]``."""
    ids = np.arange(vocab_size, dtype=np.uint64) << np.uint64(20)
    words = _mix(np.array(seeds, dtype=np.uint64)[:, None] ^ _mix(ids)[None, :])
    unit = (words >> np.uint64(40)).astype(np.float32)
    logits: npt.NDArray[np.float32] = unit * np.float32(_LOGIT_RANGE * 2.0**-24)
    return logits


def _choose(
    seeds: Sequence[int], requests: Sequence[SampleRequest], vocab_size: int
) -> list[Sampled]:
    """The token after each seed."""
    return sample(torch.from_numpy(_logits(seeds, vocab_size)), requests)


def reference_ids(
    prompt_ids: Sequence[TokenId],
    params: SamplingParams,
    vocab_size: int,
    output_ids: Sequence[TokenId] = (),
) -> list[TokenId]:
    """The right output ids, ``output_ids`` (which a resume starts from) included, up to a stop
    token or max_tokens."""
    token_ids = [*prompt_ids, *output_ids]
    hasher = hashlib.sha256(token_kv(token_ids, 0).tobytes())
    while len(token_ids) - len(prompt_ids) < params.max_tokens:
        seed = _digest_seed(hasher.copy(), len(token_ids))
        request = SampleRequest(params, len(prompt_ids), len(token_ids), token_ids)
        token_id = _choose([seed], [request], vocab_size)[0].token_id
        hasher.update(token_kv([token_id], len(token_ids)).tobytes())
        token_ids.append(token_id)
        num_output = len(token_ids) - len(prompt_ids)
        if token_id in params.stop_token_ids and num_output >= params.min_tokens:
            break
    return token_ids[len(prompt_ids) :]


# ---------------------------------------------------------------- the runner


@dataclass(slots=True)
class _Row:
    """A batch row with its block table as it was at launch."""

    row: BatchRow
    block_ids: list[int]


class _Step:
    def __init__(self, runner: "OracleRunner", rows: list[_Row], end_s: float) -> None:
        self._runner = runner
        self._rows = rows
        self._end_s = end_s

    def collect(self) -> list[RowResult]:
        return self._runner.compute(self._rows, self._end_s)


class OracleRunner:
    """Over ``storage`` ``[num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]`` of the
    oracle's layout, in host memory."""

    def __init__(self, storage: Tensor, vocab_size: int, pace: Pace) -> None:
        num_blocks, num_layers, _, self._block_size = storage.shape[:4]
        # [num_blocks, num_layers, 2, block_size, words]
        words = storage.view(num_blocks, num_layers, 2, self._block_size, -1).view(torch.int64)
        self._kv: Words = words.numpy().view(np.uint64)
        self._vocab_size = vocab_size
        self._pace = pace
        self._sampled: dict[SequenceId, TokenId] = {}

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def launch(self, batch: Batch) -> _Step:
        rows = [_Row(row, list(row.block_ids)) for row in batch.rows]
        return _Step(self, rows, self._pace.launch(batch.rows))

    def copy_block(self, source: int, target: int) -> None:
        self._kv[target] = self._kv[source]

    def poison(self, blocks: Iterable[int]) -> None:
        """What a pool is given as ``on_free``."""
        self._kv[list(blocks)] = _POISON

    def compute(self, rows: list[_Row], end_s: float) -> list[RowResult]:
        for row in rows:
            self._write(row)
        results = [RowResult() for _ in rows]
        sampling: list[int] = []
        requests: list[SampleRequest] = []
        seeds: list[int] = []
        for index, row in enumerate(rows):
            if row.row.prompt_logprobs is not None:
                results[index].prompt_logprobs = self._prompt_logprobs(row)
            if row.row.sample is not None:
                kv, num_drafts = self._read(row), row.row.num_draft_tokens
                sampling.append(index)
                requests += sample_requests(row.row, row.row.token_ids)
                seeds += _prefix_seeds(kv, len(kv) - num_drafts, num_drafts + 1)
        self._sampled = {}
        if requests:
            sampled = iter(_choose(seeds, requests, self._vocab_size))
            for index in sampling:
                batch_row, result = rows[index].row, results[index]
                fill(result, [next(sampled) for _ in range(batch_row.num_draft_tokens + 1)])
                if result.token_ids:
                    self._sampled[batch_row.seq_id] = result.token_ids[-1]
        self._pace.wait(end_s)
        return results

    def _write(self, row: _Row) -> None:
        """The KV of the row's new tokens, into their slots."""
        start = row.row.start
        token_ids = [
            self._sampled[row.row.seq_id] if token_id == IN_FLIGHT else token_id
            for token_id in row.row.token_ids
        ]
        positions = np.arange(start, start + len(token_ids))
        blocks = np.array(row.block_ids)[positions // self._block_size]
        kv = token_kv(token_ids, start).reshape(len(token_ids), NUM_LAYERS, 2, -1)
        self._kv[blocks, :, :, positions % self._block_size] = kv

    def _read(self, row: _Row) -> Words:
        """The KV of all the sequence's tokens, ``[num_tokens, words]``, in logical order."""
        num_tokens = row.row.start + len(row.row.token_ids)
        num_blocks = -(-num_tokens // self._block_size)
        blocks = self._kv[row.block_ids[:num_blocks]]
        by_token = blocks.transpose(0, 3, 1, 2, 4).reshape(num_blocks * self._block_size, -1)
        kv: Words = by_token[:num_tokens]
        return kv

    def _prompt_logprobs(self, row: _Row) -> tuple[TokenLogprobs, ...]:
        request = row.row.prompt_logprobs
        assert request is not None
        if not request.target_ids:
            return ()
        seeds = _prefix_seeds(self._read(row), row.row.start + 1, len(request.target_ids))
        logits = _logits(seeds, self._vocab_size)
        return tuple(
            token_logprobs(logits[i], token_id, request.num_top)
            for i, token_id in enumerate(request.target_ids)
        )
