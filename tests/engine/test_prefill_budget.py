"""How prompts share a step, and what that means for a short one behind a long one."""

import random
from dataclasses import replace

import pytest
from support.engines import GREEDY, Rig, prompt_of, spec_of

from engine.prefill_budget import PrefillBudget


def split(num_tokens: int, wanted: list[int], max_partial: int = 4) -> list[int]:
    budget = PrefillBudget(num_tokens, max_partial, in_chunks=True)
    for one in wanted:
        budget.join(one)
    return budget.split()


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [
        ([8000], [512]),
        ([8000, 4], [508, 4]),
        ([8000, 8000], [470, 42]),
        ([8000, 8000, 8000, 8000], [386, 42, 42, 42]),
        ([100, 4, 4], [100, 4, 4]),
        ([500, 8000], [470, 42]),
        ([100, 8000], [100, 412]),
    ],
)
def test_parts(wanted: list[int], parts: list[int]) -> None:
    assert split(512, wanted) == parts


def test_one_at_a_time() -> None:
    budget = PrefillBudget(100, 1, in_chunks=True)
    assert budget.admits(50)
    budget.join(40)
    assert budget.admits(50)
    budget.join(70)
    assert not budget.admits(1)
    assert budget.split() == [40, 60]


def test_without_chunks_a_prompt_starts_only_where_all_of_it_fits() -> None:
    budget = PrefillBudget(100, 4, in_chunks=False)
    budget.join(60)
    assert budget.admits(40) and not budget.admits(41)
    budget.join(40)
    assert budget.split() == [60, 40]


def test_never_more_than_there_is_and_nothing_left_over() -> None:
    rng = random.Random(5)
    for _ in range(5000):
        num_tokens, max_partial = rng.randint(0, 40), rng.randint(1, 5)
        budget = PrefillBudget(num_tokens, max_partial, in_chunks=True)
        wanted: list[int] = []
        while len(wanted) < 8 and budget.admits(one := rng.randint(1, 30)):
            budget.join(one)
            wanted.append(one)
        parts = budget.split()
        assert sum(parts) == min(num_tokens, sum(wanted)) if wanted else num_tokens == 0
        assert all(0 < part <= one for part, one in zip(parts, wanted, strict=True))
        assert sum(p < w for p, w in zip(parts, wanted, strict=True)) <= max_partial


@pytest.mark.parametrize("chunk", [64, 512, 2048])
def test_a_short_prompt_behind_a_long_one_starts_within_two_steps(chunk: int) -> None:
    rig = Rig(2100, max_num_batched_tokens=chunk, max_model_len=8400)
    long = spec_of(prompt_of(1, 8000), replace(GREEDY, max_tokens=1))
    short = spec_of(prompt_of(2, 4), replace(GREEDY, max_tokens=1))
    rig.engine.add(long)
    rig.step()
    rig.engine.add(short)
    rig.step()
    rig.step()
    assert rig.outputs(short)
    assert not rig.outputs(long)


def test_many_short_prompts_pass_a_long_one_that_makes_haste_all_the_same() -> None:
    rig = Rig(2100, max_num_batched_tokens=64, max_model_len=8400)
    long = spec_of(prompt_of(1, 640), replace(GREEDY, max_tokens=1))
    rig.engine.add(long)
    rig.step()
    short = [spec_of(prompt_of(i, 4), replace(GREEDY, max_tokens=1)) for i in range(2, 80)]
    rig.run(*short)
    ends = {e.seq_id: e.index for e in rig.events}
    assert len(ends) == 79
    steps = [r for r in rig.records if any(c.seq_id == long.seq_id for c in r.chunks)]
    assert len(steps) <= 14, "three quarters of each step"
    rig.assert_right([long, *short])
