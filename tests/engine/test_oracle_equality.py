"""The text depends on the token ids alone: not on chunks, depth, preemption, hits or hand-off."""

from dataclasses import replace

import pytest
from support.engines import (
    GREEDY,
    SEEDED,
    Rig,
    hand_over,
    prefill_for_hand_off,
    prompt_of,
    right_ids,
    spec_of,
)

from common.types import FinishReason, SequenceOutput

BLOCK = 4
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 50]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [16, 17, 64, 2048])
def test_chunks_and_depth(depth: int, chunk: int) -> None:
    rig = Rig(128, async_depth=depth, max_num_batched_tokens=chunk)
    specs = [
        spec_of(prompt_of(n, n), replace(params, max_tokens=1 + n % 12))
        for n in LENGTHS
        for params in (GREEDY, SEEDED)
    ]
    rig.run(*specs)
    rig.assert_right(specs)
    rig.assert_idle()


def test_without_chunked_prefill() -> None:
    rig = Rig(
        128,
        max_num_batched_tokens=16,
        max_model_len=64,
        enable_chunked_prefill=False,
        max_num_seqs=3,
    )
    specs = [spec_of(prompt_of(n, n), SEEDED) for n in (30, 40, 5, 45)]
    rig.run(*specs)
    rig.assert_right(specs)
    for spec, prompt in zip(specs, (30, 40, 5, 45), strict=True):
        chunks = [c for r in rig.records for c in r.chunks if c.seq_id == spec.seq_id]
        assert [c.num_tokens for c in chunks] == [prompt]
    rig.assert_idle()


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption_keeps_every_token(depth: int) -> None:
    rig = Rig(13, async_depth=depth)
    specs = [spec_of(prompt_of(i, 6 + i), replace(SEEDED, max_tokens=20)) for i in range(6)]
    rig.run(*specs)
    preemptions = [rig.last(spec).counts.preemptions for spec in specs]
    assert preemptions[0] == 0, "the oldest is never preempted"
    assert sum(preemptions) == rig.engine.statistics().preemptions > 0
    rig.assert_right(specs)
    for spec in specs:
        counts = rig.last(spec).counts
        assert counts.computed + counts.cached == len(spec.prompt_ids)
    rig.assert_idle()


@pytest.mark.parametrize("cached", range(4))
@pytest.mark.parametrize("num_tokens", [k * BLOCK + d for k in (1, 2, 3) for d in (-1, 0, 1)])
def test_a_cached_prefix_gives_the_same_text(num_tokens: int, cached: int) -> None:
    prompt = prompt_of(5, num_tokens)
    rig = Rig(32)
    if cached:
        rig.run(spec_of(prompt_of(5, cached * BLOCK + 1), replace(GREEDY, max_tokens=1)))
    spec = spec_of(prompt, GREEDY)
    rig.run(spec)
    assert rig.ids(spec) == right_ids(spec)
    common = min(num_tokens, cached * BLOCK) // BLOCK * BLOCK
    expected = min(common, num_tokens - 1)
    counts = rig.last(spec).counts
    assert (counts.cached, counts.computed) == (expected, num_tokens - expected)
    rig.assert_idle()


def test_the_same_prompt_four_times() -> None:
    rig = Rig(64)
    specs = [spec_of(prompt_of(9, 24), SEEDED) for _ in range(4)]
    for spec in specs:
        rig.run(spec)
    rig.assert_right(specs)
    assert [rig.last(spec).counts.cached for spec in specs] == [0, 23, 23, 23]
    statistics = rig.engine.statistics()
    assert (statistics.prefix_queries, statistics.prefix_hits) == (4, 3)


def test_salts_and_tenants_never_share() -> None:
    rig = Rig(64)
    specs = [
        spec_of(prompt_of(9, 24), GREEDY, tenant=tenant, cache_salt=salt)
        for tenant, salt in (("a", ""), ("b", ""), ("a", "s"), ("", "as"))
    ]
    for spec in specs:
        rig.run(spec)
        assert rig.last(spec).counts.cached == 0
    rig.assert_right(specs)


def test_all_keys_equal_gives_right_text() -> None:
    rig = Rig(40, key_function=lambda parent, ids: b"same")
    specs = [spec_of([seed % 3] * (8 + seed), SEEDED) for seed in range(12)]
    rig.run(*specs)
    rig.assert_right(specs)
    rig.assert_idle()


def test_eviction_under_pressure_never_changes_a_text() -> None:
    rig = Rig(20, max_num_batched_tokens=32)
    specs = []
    for turn in range(40):
        shared = prompt_of(turn % 5, 20)
        specs.append(
            spec_of(shared + prompt_of(100 + turn, turn % 7), replace(SEEDED, max_tokens=9))
        )
    rig.run(*specs)
    rig.assert_right(specs)
    assert rig.engine.statistics().prefix_evictions > 0
    rig.assert_idle()


@pytest.mark.parametrize("num_done", [1, 5, 15])
def test_resume_with_output_ids(num_done: int) -> None:
    prompt = prompt_of(3, 10)
    whole = right_ids(spec_of(prompt, SEEDED))
    rig = Rig(64)
    spec = spec_of(prompt, SEEDED, whole[:num_done])
    rig.run(spec)
    assert rig.ids(spec) == whole[num_done:]
    counts = rig.last(spec).counts
    assert (counts.computed, counts.recomputed) == (10, num_done - 1)
    rig.assert_idle()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 15, 16, 17])
def test_hand_off(num_tokens: int, depth: int) -> None:
    source, target = Rig(async_depth=depth), Rig(async_depth=depth)
    spec = spec_of(prompt_of(num_tokens, num_tokens), SEEDED)
    first = prefill_for_hand_off(source, spec)
    assert len(first.held) == -(-num_tokens // BLOCK)
    assert source.pool.counts().leased == len(first.held)
    decode = hand_over(source, target, spec, first)
    target.run()
    assert [*first.token_ids, *target.ids(decode)] == right_ids(spec)
    counts = target.last(decode).counts
    assert (counts.transferred, counts.computed, counts.cached) == (num_tokens, 0, 0)
    source.assert_idle()
    target.assert_idle()


@pytest.mark.parametrize("held_there", [0, 1, 2, 3])
def test_hand_off_moves_only_what_is_missing(held_there: int) -> None:
    source, target = Rig(), Rig()
    prompt = prompt_of(1, 3 * BLOCK)
    if held_there:
        target.run(spec_of(prompt[: held_there * BLOCK], replace(GREEDY, max_tokens=1)))
    spec = spec_of(prompt, SEEDED)
    first = prefill_for_hand_off(source, spec)
    decode = hand_over(source, target, spec, first)
    target.run()
    assert [*first.token_ids, *target.ids(decode)] == right_ids(spec)
    counts = target.last(decode).counts
    assert (counts.cached, counts.transferred) == (held_there * BLOCK, (3 - held_there) * BLOCK)
    target.assert_idle()


def test_imported_sequences_are_preempted_and_go_on() -> None:
    source, target = Rig(256), Rig(14)
    specs = [spec_of(prompt_of(i, 9), replace(SEEDED, max_tokens=24)) for i in range(3)]
    firsts = [prefill_for_hand_off(source, spec) for spec in specs]
    decodes = [
        hand_over(source, target, spec, first) for spec, first in zip(specs, firsts, strict=True)
    ]
    target.run()
    assert target.engine.statistics().preemptions > 0
    for spec, first, decode in zip(specs, firsts, decodes, strict=True):
        assert [*first.token_ids, *target.ids(decode)] == right_ids(spec)
        counts = target.last(decode).counts
        assert (counts.transferred, counts.computed) == (9, 0)
    target.assert_idle()
    source.assert_idle()


def test_resumed_prefill_hands_over_prompt_and_output() -> None:
    source, target = Rig(), Rig()
    prompt = prompt_of(2, 7)
    whole = right_ids(spec_of(prompt, SEEDED))
    spec = spec_of(prompt, SEEDED, whole[:6])
    first = prefill_for_hand_off(source, spec)
    assert first.index == 6
    assert len(first.held) == -(-13 // BLOCK)
    decode = hand_over(source, target, spec, first)
    target.run()
    assert [*first.token_ids, *target.ids(decode)] == whole[6:]
    source.assert_idle()
    target.assert_idle()


def test_a_first_token_that_ends_the_request_holds_nothing() -> None:
    rig = Rig()
    spec = spec_of(prompt_of(1, 6), replace(GREEDY, max_tokens=1), prefill_only=True)
    rig.run(spec)
    output = rig.last(spec)
    assert isinstance(output, SequenceOutput)
    assert (output.finish_reason, output.held) == (FinishReason.LENGTH, ())
    rig.assert_idle()
