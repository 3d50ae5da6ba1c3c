"""Which prefixes a pool came to hold or lost since somebody last asked: what routing follows.

1. The prefix cache notes each key that it stores or removes; a key that did both cancels out.
2. The worker takes what has gathered, and publishes it.
3. Nobody took it in time: the log is full, forgets everything and notes no more. The next take says
   ``reset``, and whoever follows needs a snapshot (`Engine.cached_keys`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from common.block_keys import BlockKey, key_prefix

# Changes that may gather between two takes, and keys that a snapshot holds.
MAX_CHANGES = 1 << 16
MAX_SNAPSHOT_KEYS = 1 << 18


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """Keys are 64-bit prefixes, see `common.block_keys.key_prefix`; ``stored`` and ``removed`` are
    disjoint and net of each other. With ``reset`` both are empty: changes were lost."""

    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    reset: bool = False


class BlockEventLog:
    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self._max_changes = max_changes
        # True: stored, False: removed. A key's changes alternate, so a second one undoes the first.
        self._changes: dict[BlockKey, bool] = {}
        self._is_lost = False

    def __bool__(self) -> bool:
        return bool(self._changes) or self._is_lost

    def note(self, key: BlockKey, stored: bool) -> None:
        if self._is_lost or self._changes.pop(key, None) is not None:
            return
        if len(self._changes) < self._max_changes:
            self._changes[key] = stored
        else:
            self._changes.clear()
            self._is_lost = True

    def take(self) -> BlockEvents:
        """What has gathered; the log is empty afterwards."""
        changes, self._changes = self._changes, {}
        is_lost, self._is_lost = self._is_lost, False
        stored = {key_prefix(key) for key, is_stored in changes.items() if is_stored}
        removed = {key_prefix(key) for key, is_stored in changes.items() if not is_stored}
        return BlockEvents(tuple(stored), tuple(removed - stored), is_lost)


def snapshot(keys: Iterable[BlockKey]) -> tuple[int, ...]:
    return tuple({key_prefix(key) for key in keys})
