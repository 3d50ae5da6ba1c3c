"""Real models: what either pool already caches does not change the text, at any block boundary."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, product
from pathlib import Path

import pytest
import torch
from support.default_model import default_entry
from support.paged import make_storage
from support.parity import load_goldens
from support.tiny_models import VOCAB_SIZE, TinyModel

from common.types import ImportReady, SamplingParams, SequenceId, SequenceOutput, SequenceSpec
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.model_runner import RunnerConfig, build_runner
from engine.models.config import read_entry
from engine.prefix_cache import PrefixCache
from engine.scheduler import SchedulerConfig

NUM_BLOCKS = 64
_numbers = count(1)


class Side:
    """One pool's engine over a prepared model."""

    def __init__(self, entry: Path, block_size: int) -> None:
        self.storage = make_storage(read_entry(entry).config, NUM_BLOCKS, block_size, torch.float32)
        runner = build_runner(RunnerConfig(), entry, self.storage)
        pool = BlockPool(NUM_BLOCKS, block_size, "m", PrefixCache(NUM_BLOCKS))
        self.engine = Engine(runner, pool, SchedulerConfig(), raises_on_fault=True)

    def run(self, seq_id: SequenceId) -> tuple[list[int], SequenceOutput]:
        """Steps until the sequence ends or leaves its blocks leased: its ids, its last output."""
        token_ids: list[int] = []
        while True:
            for event in self.engine.step()[0]:
                assert isinstance(event, SequenceOutput) and event.seq_id == seq_id
                token_ids += event.token_ids
                if event.held or event.finish_reason is not None:
                    return token_ids, event

    def generate(self, spec: SequenceSpec) -> list[int]:
        self.engine.add(spec)
        return self.run(spec.seq_id)[0]


def spec_of(prompt_ids: Sequence[int], salt: int, max_tokens: int = 6) -> SequenceSpec:
    """A salt for each case: nothing of another is cached for it."""
    seq_id = SequenceId(next(_numbers))
    params = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
    return SequenceSpec(seq_id, "r", 1, tuple(prompt_ids), (), params, cache_salt=str(salt))


def hand_off(prefill: Side, decode: Side, spec: SequenceSpec) -> tuple[list[int], int, int]:
    """Ids, and how many tokens were cached on prefill and on decode."""
    prefill.engine.add(replace(spec, prefill_only=True))
    first_ids, first = prefill.run(spec.seq_id)
    decode.engine.add_import(replace(spec, output_ids=tuple(first_ids)))
    ((ready,), _) = decode.engine.step()
    assert isinstance(ready, ImportReady)
    for move in ready.moves:
        decode.storage[move.target.block_id] = prefill.storage[first.held[move.index].block_id]
    prefill.engine.release_lease(spec.seq_id)
    decode.engine.finish_import(spec.seq_id)
    rest, last = decode.run(spec.seq_id)
    assert last.counts.cached + last.counts.transferred == len(spec.prompt_ids)
    return first_ids + rest, first.counts.cached, last.counts.cached


def check_all(entry: Path, block_size: int, num_blocks: int, prompt: Sequence[int]) -> None:
    prefill, decode = Side(entry, block_size), Side(entry, block_size)
    salts = count(1)
    for offset in (-1, 0, 1):
        num_tokens = num_blocks * block_size + offset
        ids = prompt[:num_tokens]
        cold = decode.generate(spec_of(ids, next(salts)))
        assert len(cold) == 6
        for on_prefill, on_decode in product(range(num_blocks + 1), repeat=2):
            salt = next(salts)
            for side, num_cached in ((prefill, on_prefill), (decode, on_decode)):
                if num_cached:
                    side.generate(spec_of(prompt[: num_cached * block_size], salt, 1))
            got, *cached = hand_off(prefill, decode, spec_of(ids, salt))
            assert got == cold, (num_tokens, on_prefill, on_decode)
            there = [min(n * block_size, num_tokens // block_size * block_size)
                     for n in (on_prefill, on_decode)]  # fmt: skip
            assert cached == [min(there[0], num_tokens - 1), there[1]]


def test_tiny_model(tiny: Callable[[str], TinyModel]) -> None:
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(VOCAB_SIZE, (20,), generator=generator).tolist()
    check_all(tiny("llama").entry, 4, 3, prompt)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_smollm2() -> None:
    golden = max(load_goldens(), key=lambda golden: len(golden.prompt_ids))
    check_all(default_entry(), 16, 3, golden.prompt_ids)
