"""Which worker has which prefix cached, as the workers themselves tell it.

1. A worker that joins has sent ``number`` events in its epoch. None yet: its cache is empty, and
   the index is in step. Some: a snapshot is wanted.
2. Events with the next number are applied. A number that was skipped, a reset, or a report that
   knows a later number than ours: out of step, and a snapshot is wanted.
3. While out of step a worker counts as holding nothing, and its events wait. The snapshot replaces
   all keys; events that follow it without a gap are applied, and the index is in step again.
4. A new epoch, or the worker's leaving, drops its keys.

A key is the first 8 bytes of a block's key (common/block_keys.py). A collision only misroutes:
workers look whole keys up in their own caches. Sans IO; gateway/cache_follower.py asks.
"""

import sys
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from common.wire import worker as wire

# A worker's keys beyond these are not kept: about 24 MB of Python integers.
MAX_KEYS = 1 << 18
# Events that may wait for a snapshot; what comes later makes the next snapshot necessary.
_MAX_EARLY = 64
_INT_BYTES = sys.getsizeof(1 << 63)


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    """``num_bytes`` counts the sets and their integers; ``num_gaps`` all times out of step."""

    num_workers: int
    num_keys: int
    num_bytes: int
    num_gaps: int
    num_snapshots: int
    num_keys_by_worker: dict[str, int]


@dataclass(slots=True)
class _Cache:
    """What is known of one worker. ``number``: of the last event that is in ``keys``."""

    epoch: int
    number: int
    in_step: bool
    keys: set[int] = field(default_factory=set)
    early: list[wire.KvEvents] = field(default_factory=list)

    def store(self, keys: Iterable[int]) -> None:
        self.keys.update(keys)
        while len(self.keys) > MAX_KEYS:
            self.keys.pop()

    def apply(self, events: wire.KvEvents) -> None:
        self.keys.difference_update(events.removed)
        self.store(events.stored)
        self.number = events.number


class PrefixIndex:
    """Methods that return a bool say whether a snapshot is wanted."""

    def __init__(self) -> None:
        self._caches: dict[str, _Cache] = {}
        self._num_gaps = 0
        self._num_snapshots = 0

    def report(self, worker_id: str, epoch: int, number: int) -> bool:
        """A worker's report, its first or a later one."""
        cache = self._caches.get(worker_id)
        if cache is None or cache.epoch < epoch:
            cache = self._caches[worker_id] = _Cache(epoch, number, in_step=number == 0)
        elif cache.epoch == epoch and cache.in_step and number > cache.number:
            self._lost_step(cache)
        return not cache.in_step

    def events(self, worker_id: str, events: wire.KvEvents) -> bool:
        cache = self._caches.get(worker_id)
        if cache is None or events.epoch != cache.epoch or events.number <= cache.number:
            return False
        if not cache.in_step:
            cache.early = [*cache.early[1 - _MAX_EARLY :], events]
            return True
        if events.number == cache.number + 1 and not events.reset:
            cache.apply(events)
            return False
        self._lost_step(cache)
        cache.early.append(events)
        return True

    def snapshot(self, worker_id: str, snapshot: wire.KvSnapshot) -> bool:
        """All that a worker holds; one that is older than what is known, or of another epoch, is
        no use."""
        cache = self._caches.get(worker_id)
        if cache is None or snapshot.epoch != cache.epoch or cache.in_step:
            return False
        self._num_snapshots += 1
        cache.keys.clear()
        cache.store(snapshot.keys)
        cache.number = snapshot.number
        early, cache.early = sorted(cache.early, key=lambda events: events.number), []
        for events in early:
            if events.number <= cache.number:
                continue
            if events.number != cache.number + 1 or events.reset:
                cache.keys.clear()
                cache.early = [later for later in early if later.number >= events.number]
                return True
            cache.apply(events)
        cache.in_step = True
        return False

    def leave(self, worker_id: str) -> None:
        self._caches.pop(worker_id, None)

    def lose_step(self) -> list[str]:
        """Our own link was down: whatever was sent meanwhile is lost. Returns whom to ask."""
        for cache in self._caches.values():
            self._lost_step(cache)
        return list(self._caches)

    def epoch(self, worker_id: str) -> int | None:
        cache = self._caches.get(worker_id)
        return None if cache is None else cache.epoch

    def num_held(
        self, worker_id: str, keys: Sequence[int], expected: Set[int] = frozenset()
    ) -> int:
        """How many of a prompt's leading blocks the worker has cached, or is ``expected`` to;
        ``keys`` in their order."""
        cache = self._caches.get(worker_id)
        if cache is None or not cache.in_step:
            return 0
        for number, key in enumerate(keys):
            if key not in cache.keys and key not in expected:
                return number
        return len(keys)

    def statistics(self) -> IndexStatistics:
        caches = self._caches.values()
        num_keys = sum(len(cache.keys) for cache in caches)
        return IndexStatistics(
            num_workers=len(caches),
            num_keys=num_keys,
            num_bytes=num_keys * _INT_BYTES + sum(sys.getsizeof(c.keys) for c in caches),
            num_gaps=self._num_gaps,
            num_snapshots=self._num_snapshots,
            num_keys_by_worker={name: len(cache.keys) for name, cache in self._caches.items()},
        )

    def _lost_step(self, cache: _Cache) -> None:
        self._num_gaps += 1
        cache.in_step = False
        cache.keys.clear()
        cache.early.clear()
