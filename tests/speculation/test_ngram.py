"""The n-gram index against a search from the end, and what it proposes."""

import random

import pytest
from support.engines import GREEDY, Rig, prompt_of, spec_of

from engine.sequence import Sequence
from engine.speculation.ngram import NgramIndex, NgramProposer
from engine.speculation.proposer import Ask


def sequence_of(token_ids: list[int]) -> Sequence:
    return Sequence(spec_of(token_ids, GREEDY), None, 1, 10_000, 0.0, False)


def slow_find(ids: list[int], shortest: int, longest: int) -> int | None:
    for length in range(longest, shortest - 1, -1):
        suffix = ids[-length:]
        for end in range(len(ids) - 1, length - 1, -1):
            if len(suffix) == length and ids[end - length : end] == suffix:
                return end
    return None


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_it_finds_what_a_search_from_the_end_finds(shortest: int, longest: int) -> None:
    rng = random.Random(longest)
    for num_kinds in (2, 4, 20):
        ids: list[int] = []
        index = NgramIndex(shortest, longest)
        for _ in range(150):
            ids.append(rng.randrange(num_kinds))
            assert index.add(ids)
            assert index.find(ids) == slow_find(ids, shortest, longest)


@pytest.mark.parametrize("limit", [1, 3, 64])
def test_a_long_prompt_is_indexed_in_parts(limit: int) -> None:
    ids = [1, 2, 3, 4] * 20
    index, whole = NgramIndex(2, 3), NgramIndex(2, 3)
    while not index.add(ids, limit):
        pass
    whole.add(ids)
    assert index.find(ids) == whole.find(ids) == slow_find(ids, 2, 3)


def test_a_proposal_is_what_followed_last_time() -> None:
    proposer = NgramProposer(2, 3)
    sequence = sequence_of([9, 1, 2, 5, 6, 7, 8, 1, 2])
    assert proposer.reach(sequence, 3) == 3
    assert proposer.propose([Ask(sequence, 3)]) == [[5, 6, 7]]
    assert proposer.reach(sequence, 9) == 6
    sequence.token_ids += [5, 6, 100]
    assert proposer.reach(sequence, 3) == 0


def test_what_ends_now_is_proposed_only_as_far_as_it_goes() -> None:
    proposer = NgramProposer(2, 2)
    sequence = sequence_of([7, 7, 7])
    assert proposer.reach(sequence, 5) == 1
    assert proposer.propose([Ask(sequence, 1)]) == [[7]]


def test_nothing_is_kept_of_those_that_ended() -> None:
    proposer = NgramProposer(1, 2)
    rig = Rig(proposer=proposer)
    rig.run(*(spec_of(prompt_of(n, 12), GREEDY) for n in range(3)))
    assert proposer._indexes == proposer._found == {}
