"""Of sequences with the same new prefix one computes it; the others wait for it, and hit."""

from dataclasses import replace

import pytest
from support.engines import GREEDY, SEEDED, Rig, prompt_of, spec_of

from common.types import SequenceSpec

BLOCK = 4
SHARED = prompt_of(1, 6 * BLOCK)
SHORT = replace(GREEDY, max_tokens=2)


def asking(seed: int, num_own: int = 5, **changes: object) -> SequenceSpec:
    """The shared prefix, then tokens of its own."""
    return spec_of(SHARED + prompt_of(100 + seed, num_own), SHORT, **changes)


def num_computed(rig: Rig, *specs: SequenceSpec) -> list[int]:
    return [rig.last(spec).counts.computed for spec in specs]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [8, 64])
def test_one_computes_and_the_others_hit(chunk: int, depth: int) -> None:
    rig = Rig(async_depth=depth, max_num_batched_tokens=chunk)
    specs = [asking(seed) for seed in range(4)]
    rig.run(*specs)
    assert num_computed(rig, *specs) == [29, 5, 5, 5]
    assert rig.engine.statistics().prefix_hit_tokens == 3 * len(SHARED)
    rig.assert_right(specs)
    rig.assert_idle()


def test_four_times_the_same_prompt_at_once() -> None:
    rig = Rig()
    specs = [spec_of(SHARED, SEEDED) for _ in range(4)]
    rig.run(*specs)
    assert num_computed(rig, *specs) == [24, 1, 1, 1]
    assert len({tuple(rig.ids(spec)) for spec in specs}) == 1
    rig.assert_right(specs)


def test_a_branch_is_followed_as_far_as_it_is_common() -> None:
    rig = Rig()
    longer = SHARED + prompt_of(50, 4 * BLOCK)
    one = spec_of(SHARED, SHORT)
    two, three = (spec_of(longer + prompt_of(seed, 3), SHORT) for seed in (60, 61))
    rig.run(one, two, three)
    assert num_computed(rig, one, two, three) == [24, 4 * BLOCK + 3, 3]
    rig.assert_right([one, two, three])


def test_others_pass_whoever_follows() -> None:
    rig = Rig(max_num_batched_tokens=8)
    leader, follower = asking(1), asking(2)
    other = spec_of(prompt_of(9, 3), SHORT)
    for spec in (leader, follower, other):
        rig.engine.add(spec)
    rig.step()
    assert rig.engine.statistics().num_waiting == 1
    rig.run()
    ended = [e.seq_id for e in rig.events if getattr(e, "finish_reason", None)]
    assert ended.index(other.seq_id) < ended.index(follower.seq_id)
    rig.assert_right([leader, follower, other])


def test_whoever_followed_has_its_old_place_back() -> None:
    rig = Rig(max_num_batched_tokens=4, max_num_seqs=2, max_num_partial_prefills=1)
    leader, follower = asking(1), asking(2)
    later = [spec_of(prompt_of(seed, 12), SHORT) for seed in range(10, 20)]
    rig.run(leader, follower, *later)
    firsts = [e.seq_id for e in rig.events if getattr(e, "index", None) == 0]
    # One had begun when the leader was through; none of the others came before.
    assert firsts.index(follower.seq_id) <= 2
    rig.assert_right([leader, follower, *later])


@pytest.mark.parametrize("followers", [1, 3])
def test_an_aborted_leader_is_replaced(followers: int) -> None:
    rig = Rig(max_num_batched_tokens=8)
    leader, *rest = [asking(seed) for seed in range(1 + followers)]
    for spec in (leader, *rest):
        rig.engine.add(spec)
    rig.step()
    rig.engine.abort(leader.seq_id)
    rig.run()
    # What the leader had computed until then is hit.
    assert num_computed(rig, *rest) == [29 - 8, *[5] * (followers - 1)]
    rig.assert_right(rest)
    rig.assert_idle()


def test_an_aborted_follower_is_gone() -> None:
    rig = Rig(max_num_batched_tokens=8)
    leader, one, two = (asking(seed) for seed in range(3))
    for spec in (leader, one, two):
        rig.engine.add(spec)
    rig.step()
    rig.engine.abort(one.seq_id)
    assert rig.engine.statistics().num_waiting == 1
    rig.run()
    assert num_computed(rig, leader, two) == [29, 5]
    assert not rig.outputs(one)
    rig.assert_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_preempted_leader_is_replaced(depth: int) -> None:
    """An older sequence needs the blocks while the leader is at its prompt."""
    rig = Rig(15, max_num_batched_tokens=3, async_depth=depth)
    old = spec_of(prompt_of(7, 8), replace(SEEDED, max_tokens=40))
    rig.engine.add(old)
    rig.step()
    leader, follower = asking(1, 12), asking(2, 12)
    rig.engine.add(leader)
    rig.engine.add(follower)
    while not rig.engine.statistics().preemptions:
        rig.step()
    assert not rig.outputs(leader)
    rig.run()
    rig.assert_right([old, leader, follower])
    rig.assert_idle()


def test_tenants_and_prompt_logprobs_do_not_take_part() -> None:
    rig = Rig()
    full = spec_of(SHARED, replace(SHORT, prompt_logprobs=1))
    specs = [full, asking(1, tenant="a"), asking(2, tenant="b"), asking(3, cache_salt="c")]
    rig.run(*specs)
    assert num_computed(rig, *specs) == [24, 29, 29, 29]
    rig.assert_right(specs)


def test_without_a_full_block_in_common_nobody_waits() -> None:
    rig = Rig()
    specs = [spec_of((*SHARED[: BLOCK - 1], seed, 7, 7), SHORT) for seed in range(3)]
    for spec in specs:
        rig.engine.add(spec)
    rig.step()
    assert rig.engine.statistics().num_running == 3
    rig.run()
    rig.assert_right(specs)


def test_keys_that_collide_end_in_time_and_right() -> None:
    rig = Rig(key_function=lambda parent, ids: b"same", max_num_batched_tokens=16)
    specs = [asking(seed) for seed in range(3)] + [
        spec_of(prompt_of(seed, 4 + 3 * seed), SEEDED) for seed in range(8)
    ]
    rig.run(*specs)
    rig.assert_right(specs)
    rig.assert_idle()
