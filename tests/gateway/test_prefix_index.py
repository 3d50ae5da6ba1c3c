"""The index of cached prefixes is exact whenever it says that it is in step, whatever gets lost."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.wire import worker as wire
from engine.block_events import MAX_SNAPSHOT_KEYS
from gateway.prefix_index import MAX_KEYS, PrefixIndex


def events(
    number: int, stored: tuple[int, ...] = (), removed: tuple[int, ...] = (), epoch: int = 1
):
    return wire.KvEvents(epoch=epoch, number=number, stored=stored, removed=removed)


def snapshot(number: int, keys: tuple[int, ...], epoch: int = 1) -> wire.KvSnapshot:
    return wire.KvSnapshot(epoch=epoch, number=number, keys=keys)


def test_a_worker_that_has_told_nothing_yet_is_in_step() -> None:
    index = PrefixIndex()
    assert not index.report("p", 1, 0)
    assert not index.events("p", events(1, stored=(1, 2, 3)))
    assert not index.events("p", events(2, stored=(4,), removed=(2,)))
    assert index.num_held("p", (1, 2, 3)) == 1
    assert index.num_held("p", (3, 4, 1)) == 3
    assert index.num_held("p", (9,)) == index.num_held("other", (1,)) == 0


def test_a_worker_that_was_there_before_is_asked_for_a_snapshot() -> None:
    index = PrefixIndex()
    assert index.report("p", 1, 7)
    assert index.num_held("p", (1,)) == 0
    # What comes before the snapshot waits for it.
    assert index.events("p", events(8, stored=(8,)))
    assert index.events("p", events(9, stored=(9,), removed=(1,)))
    assert not index.snapshot("p", snapshot(8, (1, 8)))
    assert index.num_held("p", (8, 9)) == 2
    assert index.num_held("p", (1,)) == 0


@pytest.mark.parametrize("way", ["skipped", "report", "reset"])
def test_a_gap_empties_the_index_until_a_snapshot(way: str) -> None:
    index = PrefixIndex()
    index.report("p", 1, 0)
    index.events("p", events(1, stored=(1,)))
    if way == "skipped":
        assert index.events("p", events(3, stored=(3,)))
    elif way == "report":
        assert index.report("p", 1, 3)
    else:
        assert index.events("p", wire.KvEvents(epoch=1, number=2, reset=True))
    assert index.num_held("p", (1,)) == 0
    assert not index.snapshot("p", snapshot(3, (1, 2, 3)))
    assert index.num_held("p", (1, 2, 3)) == 3
    assert (index.statistics().num_gaps, index.statistics().num_snapshots) == (1, 1)


def test_a_gap_behind_the_snapshot_needs_another() -> None:
    index = PrefixIndex()
    index.report("p", 1, 3)
    index.events("p", events(6, stored=(6,)))
    assert index.snapshot("p", snapshot(4, (1,)))
    assert index.num_held("p", (1,)) == 0
    assert not index.snapshot("p", snapshot(5, (1,)))
    assert index.num_held("p", (1, 6)) == 2


def test_a_new_epoch_and_a_leave_drop_what_was_known() -> None:
    index = PrefixIndex()
    index.report("p", 1, 0)
    index.events("p", events(1, stored=(1,)))
    assert not index.report("p", 2, 0)
    assert index.num_held("p", (1,)) == 0
    assert not index.events("p", events(2, stored=(2,), epoch=1))
    assert not index.snapshot("p", snapshot(2, (2,), epoch=1))
    index.events("p", events(1, stored=(5,), epoch=2))
    assert index.num_held("p", (5,)) == 1
    index.leave("p")
    assert not index.events("p", events(2, stored=(6,), epoch=2))
    assert index.num_held("p", (5,)) == 0
    assert index.statistics().num_bytes == index.statistics().num_workers == 0


def test_our_own_link_was_down() -> None:
    index = PrefixIndex()
    index.report("p", 1, 0)
    index.events("p", events(1, stored=(1,)))
    assert index.lose_step() == ["p"]
    assert index.num_held("p", (1,)) == 0


def test_a_worker_cannot_make_the_index_grow_without_bound() -> None:
    index = PrefixIndex()
    index.report("p", 1, 0)
    for number in (1, 2, 3):
        start = number * MAX_KEYS // 2
        index.events("p", events(number, stored=tuple(range(start, start + MAX_KEYS // 2))))
    assert index.statistics().num_keys == MAX_KEYS == MAX_SNAPSHOT_KEYS
    assert index.statistics().num_bytes < 32 << 20


@st.composite
def histories(draw: st.DrawFn) -> Iterator[object]:
    """Changes of one worker's cache, each with what becomes of its message."""
    change = st.tuples(st.sets(st.integers(0, 9), max_size=3), st.sets(st.integers(0, 9)))
    fate = st.sampled_from(("arrives", "arrives", "lost", "late", "twice"))
    return draw(st.lists(st.tuples(change, fate, st.booleans()), max_size=25))


@settings(max_examples=100, deadline=None)
@given(history=histories())
def test_in_step_means_exact(history) -> None:  # type: ignore[no-untyped-def]
    """Messages are lost, late or doubled; now and then a snapshot is answered. Whatever the index
    claims to hold, the worker held after the same event; and it always comes back into step."""
    index, worker, number = PrefixIndex(), set(), 0
    was: dict[int, set[int]] = {0: set()}
    late: list[wire.KvEvents] = []
    wanted = index.report("p", 1, 0)
    for (stored, removed), fate, is_asked in history:
        number += 1
        added, gone = stored - worker, (removed & worker) - stored
        worker = (worker | added) - gone
        was[number] = set(worker)
        message = events(number, tuple(added), tuple(gone))
        if fate == "late":
            late.append(message)
        for _ in range({"arrives": 1, "twice": 2}.get(fate, 0)):
            wanted = index.events("p", message) or wanted
        if len(late) > 1:
            wanted = index.events("p", late.pop(0)) or wanted
        if wanted and is_asked:
            wanted = index.snapshot("p", snapshot(number, tuple(worker)))
        cache = index._caches["p"]
        if cache.in_step:
            assert cache.keys == was[cache.number]
    if index.report("p", 1, number):
        assert not index.snapshot("p", snapshot(number, tuple(worker)))
    assert index._caches["p"].keys == worker
