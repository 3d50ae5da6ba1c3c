"""Prefixes that a worker is about to have, by what this gateway itself has sent there.

Block events tell of a block once it is stored: a step or two after the prompt was granted, and
after the last token of an answer. A burst of prompts with one new prefix, or a client whose next
turn follows at once, would come too early for them. What is expected here counts as cached for
`EXPECT_S`; by then the events have come, or it was not so.
"""

from collections.abc import Callable, Iterable, Set

EXPECT_S = 2.0


class ExpectedPrefixes:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # By worker: key to the time when it expires, the next to expire first.
        self._until_s: dict[str, dict[int, float]] = {}

    def expect(self, worker_id: str, keys: Iterable[int]) -> None:
        expected = self._until_s.setdefault(worker_id, {})
        until_s = self._clock() + EXPECT_S
        for key in keys:
            expected.pop(key, None)
            expected[key] = until_s

    def of(self, worker_id: str) -> Set[int]:
        expected = self._until_s.get(worker_id, {})
        now_s = self._clock()
        while expected and expected[key := next(iter(expected))] <= now_s:
            del expected[key]
        return expected.keys()
