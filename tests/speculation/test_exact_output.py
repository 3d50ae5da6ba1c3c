"""With any drafts the output is the one without: ids, ends, logprobs, usage, and the pool."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
from support.proposers import ScriptedProposer, always_wrong, hostile, noisy, perfect

from common.types import FinishReason, SamplingParams, SequenceSpec
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Proposer

BLOCK = 4
PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "perfect": perfect,
    "wrong": always_wrong,
    "noisy": lambda: noisy(1, 0.7),
    "hostile": lambda: hostile(2),
    "ngram": lambda: NgramProposer(1, 3),
}
# What changes logits, history or candidates, one by one and all together.
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.3},
    {"temperature": 0.9, "frequency_penalty": 0.8},
    {"temperature": 0.9, "presence_penalty": 1.1},
    {"temperature": 0.8, "logit_bias": ((3, 4.0), (9, -50.0))},
    {"temperature": 0.9, "min_tokens": 11, "stop_token_ids": tuple(range(0, 512, 3))},
    {
        "temperature": 1.1, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "frequency_penalty": 0.3, "presence_penalty": -0.4, "logit_bias": ((7, 2.0),),
    },
]  # fmt: skip


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", PROPOSERS)
def test_every_length_over_block_boundaries(name: str, k: int) -> None:
    rig = Rig(160, proposer=PROPOSERS[name](), max_drafts=k)
    specs = [
        spec_of(prompt_of(n, n), replace(params, max_tokens=1 + n % 13))
        for n in (1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33)
        for params in (GREEDY, SEEDED)
    ]
    rig.run(*specs)
    rig.assert_right(specs)
    rig.assert_idle()


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("params", PARAMETERS, ids=str)
def test_every_sampling_parameter(params: dict[str, Any], name: str) -> None:
    rig = Rig(96, proposer=PROPOSERS[name](), max_drafts=4)
    # The prompts repeat themselves, so that n-grams have something to find.
    specs = [
        spec_of(prompt_of(n, 5) * 3, SamplingParams(max_tokens=24, seed=2**63 + n, **params))
        for n in range(4)
    ]
    rig.run(*specs)
    rig.assert_right(specs)
    rig.assert_idle()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", PROPOSERS)
def test_under_preemption(name: str, depth: int) -> None:
    rig = Rig(15, proposer=PROPOSERS[name](), async_depth=depth)
    specs = [
        spec_of(prompt_of(i, 6 + i), replace(SEEDED, max_tokens=20, presence_penalty=0.1 * (i % 2)))
        for i in range(6)
    ]
    rig.run(*specs)
    assert rig.engine.statistics().preemptions > 0
    rig.assert_right(specs)
    for spec in specs:
        counts = rig.last(spec).counts
        assert counts.computed + counts.cached == len(spec.prompt_ids)
    rig.assert_idle()


@pytest.mark.parametrize("name", PROPOSERS)
def test_with_prefix_hits_and_chunks(name: str) -> None:
    rig = Rig(40, proposer=PROPOSERS[name](), max_num_batched_tokens=12)
    specs = [
        spec_of(prompt_of(turn % 3, 10) + prompt_of(50 + turn, turn % 5), SEEDED)
        for turn in range(14)
    ]
    rig.run(*specs)
    rig.assert_right(specs)
    assert rig.engine.statistics().prefix_hits > 0
    rig.assert_idle()


@pytest.mark.parametrize("there", [None, *PROPOSERS])
@pytest.mark.parametrize("here", [None, "hostile"])
def test_hand_off_between_pools_with_and_without(here: str | None, there: str | None) -> None:
    source = Rig(proposer=PROPOSERS[here]() if here else None)
    target = Rig(proposer=PROPOSERS[there]() if there else None)
    for num_tokens in (1, 3, 4, 5, 16, 17):
        spec = spec_of(prompt_of(num_tokens, num_tokens), SEEDED)
        first = prefill_for_hand_off(source, spec)
        decode = hand_over(source, target, spec, first)
        target.run()
        assert [*first.token_ids, *target.ids(decode)] == right_ids(spec)
    source.assert_idle()
    target.assert_idle()


@pytest.mark.parametrize("num_done", [1, 5, 11])
def test_moved_to_another_worker(num_done: int) -> None:
    prompt = prompt_of(3, 10)
    whole = right_ids(spec_of(prompt, SEEDED))
    rig = Rig(proposer=perfect())
    spec = spec_of(prompt, SEEDED, whole[:num_done])
    rig.run(spec)
    assert rig.ids(spec) == whole[num_done:]
    rig.assert_idle()


def plain(spec: SequenceSpec) -> Rig:
    rig = Rig()
    rig.run(spec)
    return rig


def assert_same_end(spec: SequenceSpec, rig: Rig, without: Rig) -> None:
    """Ids, finish reason, what matched, logprobs and usage; all drafts aside."""
    assert rig.ids(spec) == without.ids(spec)
    last, expected = rig.last(spec), without.last(spec)
    assert last.finish_reason is expected.finish_reason
    assert last.matched_token_id == expected.matched_token_id
    got = [one for output in rig.outputs(spec) for one in output.logprobs]
    assert got == [one for output in without.outputs(spec) for one in output.logprobs]
    sums = ("computed", "cached", "transferred", "recomputed", "preemptions")
    for name in sums:
        assert getattr(last.counts, name) == getattr(expected.counts, name)


@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_max_tokens_inside_an_accepted_run(max_tokens: int) -> None:
    params = replace(SEEDED, max_tokens=max_tokens, logprobs=2)
    spec = spec_of(prompt_of(4, 7), params)
    rig = Rig(proposer=perfect())
    rig.run(spec)
    assert_same_end(spec, rig, plain(spec))
    assert rig.last(spec).finish_reason is FinishReason.LENGTH
    rig.assert_idle()


@pytest.mark.parametrize("min_tokens", [0, 4])
@pytest.mark.parametrize("stop_at", range(1, 7))
def test_stop_inside_an_accepted_run(stop_at: int, min_tokens: int) -> None:
    prompt = prompt_of(5, 7)
    stop_id = right_ids(spec_of(prompt, SEEDED))[stop_at - 1]
    params = replace(
        SEEDED, stop_token_ids=(stop_id,), min_tokens=min_tokens, max_tokens=12, logprobs=0
    )
    spec = spec_of(prompt, params)
    rig = Rig(proposer=perfect())
    rig.run(spec)
    assert_same_end(spec, rig, plain(spec))
    if min_tokens < stop_at:
        assert len(rig.ids(spec)) == stop_at
        assert rig.last(spec).matched_token_id == stop_id
    rig.assert_idle()


@pytest.mark.parametrize("max_tokens", range(1, 7))
@pytest.mark.parametrize("stop_at", range(1, 7))
def test_a_stop_and_a_limit_inside_one_accepted_run(stop_at: int, max_tokens: int) -> None:
    """Whichever comes first ends it; both at one token are a stop."""
    prompt = prompt_of(7, 7)
    ids = right_ids(spec_of(prompt, SEEDED))[:6]
    stop_at = ids.index(ids[stop_at - 1]) + 1
    params = replace(SEEDED, stop_token_ids=(ids[stop_at - 1],), max_tokens=max_tokens, logprobs=1)
    spec = spec_of(prompt, params)
    rig = Rig(proposer=perfect())
    rig.run(spec)
    assert_same_end(spec, rig, plain(spec))
    assert len(rig.ids(spec)) == min(stop_at, max_tokens)
    ends = FinishReason.STOP if stop_at <= max_tokens else FinishReason.LENGTH
    assert rig.last(spec).finish_reason is ends
    rig.assert_idle()


def test_the_end_of_the_context_inside_an_accepted_run() -> None:
    for max_model_len in range(9, 16):
        spec = spec_of(prompt_of(6, 8), GREEDY)
        rig, without = (
            Rig(proposer=perfect(), max_model_len=max_model_len),
            Rig(max_model_len=max_model_len),
        )
        rig.run(spec)
        without.run(spec)
        assert_same_end(spec, rig, without)
        rig.assert_idle()


def test_a_perfect_draft_needs_few_steps() -> None:
    rig = Rig(proposer=perfect(), max_drafts=5)
    spec = spec_of(prompt_of(1, 8), replace(GREEDY, max_tokens=25))
    rig.run(spec)
    assert [len(output.token_ids) for output in rig.outputs(spec)] == [1, 6, 6, 6, 6]
    counts = rig.last(spec).counts
    assert (counts.drafted, counts.accepted) == (20, 20)
    statistics = rig.engine.statistics().speculation
    assert statistics is not None
    assert statistics.accepted_by_position == (4, 4, 4, 4, 4)
    assert statistics.num_emitted_tokens == 24
    assert sum(record.num_draft_tokens for record in rig.records) == 20
    assert sum(record.num_accepted_tokens for record in rig.records) == 20


def test_nothing_is_drafted_for_who_asks_for_that() -> None:
    proposer = perfect()
    rig = Rig(proposer=proposer)
    off = spec_of(prompt_of(1, 8), GREEDY, speculate=False)
    on = spec_of(prompt_of(2, 8), GREEDY)
    rig.run(off, on)
    assert rig.last(off).counts.drafted == 0 < rig.last(on).counts.drafted
    assert set(proposer.forgotten) == {off.seq_id, on.seq_id}


def test_what_is_no_proposal_is_counted_and_ignored() -> None:
    for bad in ([512], [-1], [2**40], [1] * 6, [1, 2, -3]):
        rig = Rig(proposer=ScriptedProposer(lambda sequence, k, bad=bad: bad), max_drafts=5)
        spec = spec_of(prompt_of(1, 8), GREEDY)
        rig.run(spec)
        rig.assert_right([spec])
        statistics = rig.engine.statistics().speculation
        assert statistics is not None and statistics.num_drafts == 0
        assert statistics.num_invalid > 0
        rig.assert_idle()


def test_an_abort_between_any_two_steps() -> None:
    rng = random.Random(5)
    for _ in range(30):
        rig = Rig(24, proposer=noisy(3, 0.8), async_depth=rng.randint(0, 1))
        specs = [spec_of(prompt_of(i, 9), SEEDED) for i in range(3)]
        for spec in specs:
            rig.engine.add(spec)
        for _ in range(rng.randint(1, 6)):
            rig.step()
        rig.engine.abort(specs[1].seq_id)
        rig.run()
        rig.assert_right([specs[0], specs[2]])
        rig.assert_idle()


def test_blocks_for_drafts_are_given_back_and_never_taken_from_others() -> None:
    """One sequence may fill the pool: its drafts are cut, not its tokens."""
    rig = Rig(7, block_size=4, caching=False, proposer=always_wrong(), max_drafts=5)
    spec = spec_of(prompt_of(1, 4), replace(GREEDY, max_tokens=21))
    rig.engine.add(spec)
    while rig.engine.has_work:
        rig.step()
        in_use = rig.pool.counts().in_use
        num_tokens = 4 + len(rig.ids(spec))
        assert in_use <= -(-num_tokens // 4) + 1
    rig.assert_right([spec])
    assert rig.engine.statistics().preemptions == 0
    rig.assert_idle()
