"""SmolLM2 in one engine against transformers' greedy ids (invariant I2 of docs/design.md)."""

import json
from collections.abc import Sequence
from itertools import count

import pytest
import torch
from support.default_model import default_entry
from support.paged import make_storage
from support.parity import GOLDENS, TIE_GAP, Golden, ParityCheck, load_goldens

from common.types import SamplingParams, SequenceId, SequenceOutput, SequenceSpec
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.model_runner import RunnerConfig, build_runner
from engine.models.config import read_entry
from engine.prefix_cache import PrefixCache
from engine.scheduler import SchedulerConfig

# One of each kind, none long: what the default run has time for.
QUICK = (
    "one-token", "capital-of-france", "code", "digits", "emoji", "chinese", "length-16",
    "length-17",
)  # fmt: skip
NUM_BLOCKS = 600


class SmolLM2:
    """One engine with the real model; ids by one batched run."""

    def __init__(self, kernels: str = "auto", quantization: str = "none", **config: int) -> None:
        entry = default_entry()
        storage = make_storage(read_entry(entry).config, NUM_BLOCKS, 16, torch.float32)
        runner = build_runner(
            RunnerConfig(kernels=kernels, quantization=quantization), entry, storage
        )
        pool = BlockPool(NUM_BLOCKS, 16, "smollm2", PrefixCache(NUM_BLOCKS))
        self.engine = Engine(runner, pool, SchedulerConfig(**config))  # type: ignore[arg-type]
        self._ids = count(1)

    def generate(self, work: Sequence[tuple[Golden, int]]) -> list[list[int]]:
        """What follows each golden's first tokens, all sequences at once."""
        outputs: dict[SequenceId, list[int]] = {}
        for golden, start in work:
            seq_id = SequenceId(next(self._ids))
            outputs[seq_id] = []
            self.engine.add(
                SequenceSpec(
                    seq_id=seq_id,
                    request_id=golden.name,
                    attempt=1,
                    prompt_ids=tuple(golden.prompt_ids),
                    output_ids=tuple(golden.token_ids[:start]),
                    params=SamplingParams(
                        max_tokens=len(golden.token_ids), seed=0, temperature=0.0
                    ),
                )
            )
        while self.engine.has_work:
            for event in self.engine.step()[0]:
                assert isinstance(event, SequenceOutput), event
                outputs[event.seq_id] += event.token_ids
        return list(outputs.values())

    def compare(self, goldens: Sequence[Golden]) -> None:
        check = ParityCheck()
        work = [(golden, 0) for golden in goldens]
        while work:
            outputs = self.generate(work)
            ends = [
                (golden, check.compare(golden, token_ids, start))
                for (golden, start), token_ids in zip(work, outputs, strict=True)
            ]
            work = [(golden, start) for golden, start in ends if start is not None]
        check.finish()


def test_goldens_are_of_this_model() -> None:
    content = json.loads(GOLDENS.read_text())
    assert content["model_fingerprint"] == read_entry(default_entry()).description.fingerprint
    assert len(content["goldens"]) >= 24
    assert max(len(golden["prompt_ids"]) for golden in content["goldens"]) >= 1500


@pytest.mark.parametrize("kernels", ["numba", pytest.param("torch", marks=pytest.mark.full)])
def test_quick_goldens_at_once_in_small_chunks(kernels: str) -> None:
    SmolLM2(kernels, max_num_batched_tokens=24).compare(load_goldens(QUICK))


def test_int4_loses_nothing_of_a_q4_1_file() -> None:
    """Its levels, and those of its Q8_0 embedding, are found again in the dequantised weights."""
    SmolLM2("numba", "int4", max_num_batched_tokens=64).compare(load_goldens(QUICK))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_all_goldens_at_once() -> None:
    SmolLM2(max_num_batched_tokens=512).compare(load_goldens())


@pytest.mark.full
@pytest.mark.timeout(900)
def test_goldens_made_again_are_the_same() -> None:
    """Scores may differ in the last digits on another machine, ids only at a tie."""
    from golden.make_goldens import make_goldens

    for old, new in zip(load_goldens(), make_goldens(default_entry()), strict=True):
        assert (old.name, old.prompt_ids) == (new.name, new.prompt_ids)
        for index, (was, now) in enumerate(zip(old.token_ids, new.token_ids, strict=True)):
            if was != now:
                assert old.gap(index) < TIE_GAP
                break
            assert old.best_scores[index] == pytest.approx(new.best_scores[index], abs=1e-3)
            assert old.second_scores[index] == pytest.approx(new.second_scores[index], abs=1e-3)
