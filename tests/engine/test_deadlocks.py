"""Five patterns in which an engine could come to a halt, and the bound on preemptions."""

from dataclasses import replace

import pytest
from support.engines import (
    SEEDED,
    Rig,
    hand_over,
    prefill_for_hand_off,
    prompt_of,
    right_ids,
    spec_of,
)

from common.types import SequenceSpec
from engine.block_tables import AllocatorKind

BLOCK = 4


def long_ones(num: int, num_tokens: int, max_tokens: int = 16) -> list[SequenceSpec]:
    params = replace(SEEDED, max_tokens=max_tokens)
    return [spec_of(prompt_of(seed, num_tokens), params) for seed in range(num)]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_pool_smaller_than_two_long_requests(depth: int) -> None:
    rig = Rig(11, async_depth=depth, max_num_batched_tokens=16)
    specs = long_ones(3, 20)
    rig.run(*specs)
    rig.assert_right(specs)
    # Preempted ones wait for real room: they do not bounce.
    assert rig.engine.statistics().preemptions <= 3 * len(specs)
    rig.assert_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_both_pools_full(depth: int) -> None:
    """Prefill is full of leases, decode of running sequences; each hand-off waits for both."""
    source, target = Rig(13, async_depth=depth), Rig(13, async_depth=depth)
    specs = long_ones(8, 14, max_tokens=12)
    waiting = list(specs)
    handed: list[tuple[SequenceSpec, tuple[int, ...], SequenceSpec]] = []
    while waiting:
        held = [(spec, prefill_for_hand_off(source, spec)) for spec in waiting[:3]]
        if len(held) == 3:
            assert source.pool.num_available == 0
        waiting = waiting[3:]
        for spec, first in held:
            handed.append((spec, first.token_ids, hand_over(source, target, spec, first)))
    target.run()
    for spec, first_ids, decode in handed:
        assert [*first_ids, *target.ids(decode)] == right_ids(spec)
    source.assert_idle()
    target.assert_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_long_prompt_behind_many_short_ones(depth: int) -> None:
    rig = Rig(11, async_depth=depth, max_num_batched_tokens=16)
    short = [spec_of(prompt_of(seed, 2), replace(SEEDED, max_tokens=16)) for seed in range(24)]
    (long,) = long_ones(1, 24)
    specs = [*short[:12], long, *short[12:]]
    rig.run(*specs)
    rig.assert_right(specs)
    ended = [e.seq_id for e in rig.events if getattr(e, "finish_reason", None)]
    assert ended.index(long.seq_id) < len(ended) - 4, "those behind it must not pass it for ever"
    rig.assert_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_all_grow_into_the_next_block_at_once(depth: int) -> None:
    """Every sequence wants room at the same step, over and over, and there is none."""
    rig = Rig(13, async_depth=depth)
    specs = long_ones(6, 7, max_tokens=30)
    rig.run(*specs)
    rig.assert_right(specs)
    assert rig.engine.statistics().preemptions > 0
    rig.assert_idle()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("when", range(4))
def test_cancel_of_a_preempted_request(when: int, depth: int) -> None:
    rig = Rig(13, async_depth=depth)
    specs = long_ones(6, 7, max_tokens=30)
    for spec in specs:
        rig.engine.add(spec)
    gone: list[SequenceSpec] = []
    while rig.engine.has_work:
        before = rig.engine.statistics().preemptions
        rig.step()
        if rig.engine.statistics().preemptions > before and len(gone) < 3:
            scheduler = rig.engine._scheduler
            preempted = [s for s in scheduler.waiting if s.num_preemptions]
            if preempted:
                victim = preempted[when % len(preempted)]
                gone.append(victim.spec)
                rig.engine.abort(victim.seq_id)
    assert gone
    rig.assert_right([spec for spec in specs if spec not in gone])
    rig.assert_idle()


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_preemptions_are_bounded_while_another_can_go(bound: int) -> None:
    """The oldest is never in need; all the others together do not suffer more than they must."""
    rig = Rig(16, max_preemptions=bound)
    specs = long_ones(8, 6, max_tokens=24)
    rig.run(*specs)
    rig.assert_right(specs)
    preemptions = [rig.last(spec).counts.preemptions for spec in specs]
    assert sum(preemptions) > 0
    if bound == 2:
        assert max(preemptions) <= bound


def test_contiguous_reserves_the_longest_and_never_preempts() -> None:
    rig = Rig(33, allocator=AllocatorKind.CONTIGUOUS, max_model_len=32)
    specs = long_ones(8, 6, max_tokens=24)
    for spec in specs:
        rig.engine.add(spec)
    rig.step()
    assert rig.engine.statistics().num_running == 4, "of 8 blocks each, whatever they need"
    rig.run()
    rig.assert_right(specs)
    assert rig.engine.statistics().preemptions == 0
    rig.assert_idle()
