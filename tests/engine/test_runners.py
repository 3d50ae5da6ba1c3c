"""The oracle against its own reference, the null model, and what both cost."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.engines import GREEDY, SEEDED, VOCAB_SIZE, Rig, prompt_of, spec_of

from common.types import SequenceId, SequenceSpec
from engine.batch import BatchRow
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.null_runner import VOCAB_SIZE as NULL_VOCAB_SIZE
from engine.null_runner import NullRunner, next_id, null_layout
from engine.oracle import OracleRunner, oracle_layout, reference_ids, token_kv
from engine.pace import Pace
from engine.prefix_cache import PrefixCache
from engine.runner import ModelRunner
from engine.scheduler import SchedulerConfig


def test_kv_depends_on_token_position_and_layer() -> None:
    kv = token_kv([5, 6, 5], 0)
    assert len(np.unique(kv)) == kv.size
    assert (token_kv([6], 1) == kv[1]).all()


def test_the_reference_is_fixed() -> None:
    """A change of these ids is a change of the model: results of two builds no longer compare."""
    assert reference_ids((1, 2, 3), GREEDY, VOCAB_SIZE)[:6] == [168, 192, 146, 70, 279, 412]
    assert reference_ids((1, 2, 3), SEEDED, VOCAB_SIZE)[:6] == [143, 355, 124, 280, 451, 116]


def test_text_does_not_depend_on_the_block_size() -> None:
    spec = spec_of(prompt_of(1, 21), SEEDED)
    for block_size in (1, 4, 16):
        rig = Rig(64, block_size=block_size)
        rig.run(spec)
        rig.assert_right([spec])
        rig.assert_idle()


def test_a_stop_token_ends_the_reference() -> None:
    free = reference_ids((1, 2, 3), GREEDY, VOCAB_SIZE)
    stopped = replace(GREEDY, stop_token_ids=(free[3],))
    assert reference_ids((1, 2, 3), stopped, VOCAB_SIZE) == free[:4]


def test_temperature_matters() -> None:
    texts = {
        tuple(reference_ids((1, 2, 3), replace(SEEDED, seed=seed), VOCAB_SIZE)) for seed in range(5)
    }
    assert len(texts) == 5


@pytest.mark.fault("V16")
def test_poison_is_seen() -> None:
    layout = oracle_layout(4)
    storage = torch.zeros((3, *layout.block_shape))
    OracleRunner(storage, VOCAB_SIZE, Pace(0.0)).poison([2])
    assert (storage[2].view(torch.uint8) == 0xA5).all()
    assert (storage[:2] == 0).all()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_null_model_counts(depth: int) -> None:
    pool = BlockPool(64, 16, "null", PrefixCache(64))
    engine = Engine(NullRunner(Pace(0.0)), pool, SchedulerConfig(async_depth=depth))
    engine.add(SequenceSpec(SequenceId(1), "r", 1, (7, 1020), (), replace(SEEDED, max_tokens=8)))
    ids: list[int] = []
    while engine.has_work:
        events, _ = engine.step()
        for event in events:
            ids += event.token_ids  # type: ignore[union-attr]
    assert ids == [1021, 1022, 1023, 0, 1, 2, 3, 4]
    assert next_id(NULL_VOCAB_SIZE - 1) == 0


def test_pace() -> None:
    now_s = 100.0
    slept: list[float] = []

    def sleep(duration_s: float) -> None:
        nonlocal now_s
        now_s += duration_s
        slept.append(duration_s)

    pace = Pace(0.5, lambda: now_s, sleep)
    first, second = pace.launch([]), pace.launch([])
    assert (first, second) == (100.5, 101.0)
    pace.wait(first)
    pace.wait(second)
    assert slept == [0.5, 0.5]
    pace.wait(first)
    assert slept == [0.5, 0.5]
    pace = Pace(0.5, lambda: now_s, sleep, token_delay_s=0.25)
    rows = [BatchRow(SequenceId(1), [7], 4, [1]), BatchRow(SequenceId(2), [7, 7, 7], 0, [2])]
    assert pace.launch(rows) == now_s + 1.0


def process_ms_a_step(runner: ModelRunner, num_sequences: int, num_tokens: int) -> float:
    """Best of three rounds, so that a busy machine is not measured."""
    pool = BlockPool(8192, 16, "m", PrefixCache(8192))
    config = SchedulerConfig(max_num_batched_tokens=1 << 20)
    engine = Engine(runner, pool, config)
    params = replace(GREEDY, max_tokens=200)
    for number in range(num_sequences):
        prompt = tuple((number + i) % 500 for i in range(num_tokens))
        engine.add(SequenceSpec(SequenceId(number), "r", 1, prompt, (), params))
    engine.step()
    rounds_ms = []
    for _ in range(3):
        started_s = time.process_time()
        for _ in range(20):
            engine.step()
        rounds_ms.append((time.process_time() - started_s) / 20 * 1e3)
    return min(rounds_ms)


def test_steps_are_cheap() -> None:
    assert null_layout(16).block_bytes % 256 == 0
    assert process_ms_a_step(NullRunner(Pace(0.0)), 64, 100) < 2.0
    layout = oracle_layout(16)
    storage = torch.zeros((8192, *layout.block_shape))
    oracle = OracleRunner(storage, VOCAB_SIZE, Pace(0.0))
    assert process_ms_a_step(oracle, 1, 1000) < 1.0
