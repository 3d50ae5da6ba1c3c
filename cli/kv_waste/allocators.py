"""Three allocators over one address space of token slots.

A *slot* holds the keys and values of one token in all layers. No room is a value (None); giving
back what was not taken is our own bug.
"""

import heapq
from bisect import bisect_left, insort
from collections import defaultdict


class FirstFit:
    """Regions of any size; the lowest hole that is large enough. Neighbouring holes are merged.

    Knuth, The Art of Computer Programming 1, section 2.5, algorithms A and B.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots
        self._holes = [(0, num_slots)] if num_slots else []

    def allocate(self, size: int) -> int | None:
        """Address of a region of ``size`` slots, or None."""
        for index, (start, length) in enumerate(self._holes):
            if length >= size:
                rest = [(start + size, length - size)] if length > size else []
                self._holes[index : index + 1] = rest
                self.num_free -= size
                return start
        return None

    def release(self, start: int, size: int) -> None:
        self.num_free += size
        index = bisect_left(self._holes, (start, size))
        end = start + size
        if index < len(self._holes) and self._holes[index][0] <= end:
            assert self._holes[index][0] == end, "region given back twice"
            end += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) >= start:
            assert sum(self._holes[index - 1]) == start, "region given back twice"
            start = self._holes.pop(index - 1)[0]
        insort(self._holes, (start, end - start))


class Buddy:
    """Regions of power-of-two size: a larger one is split in halves, and two free halves of one
    region, *buddies*, merge again. Of several free regions the lowest is taken.

    Knowlton 1965, "A fast storage allocator". An address space that is no power of two is laid out
    as the powers of two that it is the sum of, largest first, so that each is aligned to its size
    and a region's buddy is ``address ^ size`` everywhere.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_free = num_slots
        # Lowest address first. A merged region stays in its heap until it comes to the top.
        self._heaps: dict[int, list[int]] = defaultdict(list)
        self._free: dict[int, set[int]] = defaultdict(set)
        self._sizes = [1 << bit for bit in range(num_slots.bit_length())]
        self.largest = self._sizes[-1] if num_slots else 0
        start = 0
        for size in reversed(self._sizes):
            if num_slots & size:
                self._put(start, size)
                start += size

    def allocate(self, size: int) -> int | None:
        """Address of a region of ``size`` slots, a power of two, or None."""
        assert size & (size - 1) == 0
        fitting = (s for s in self._sizes if s >= size and self._free[s])
        if (found := next(fitting, None)) is None:
            return None
        start = self._pop(found)
        while found > size:
            found //= 2
            self._put(start + found, found)
        self.num_free -= size
        return start

    def release(self, start: int, size: int) -> None:
        assert start not in self._free[size], "region given back twice"
        self.num_free += size
        while (start ^ size) in self._free[size]:
            self._free[size].remove(start ^ size)
            start, size = min(start, start ^ size), size * 2
        self._put(start, size)

    def _put(self, start: int, size: int) -> None:
        self._free[size].add(start)
        heapq.heappush(self._heaps[size], start)

    def _pop(self, size: int) -> int:
        while (start := heapq.heappop(self._heaps[size])) not in self._free[size]:
            pass
        self._free[size].remove(start)
        return start


class BlockPool:
    """Blocks of one size, anywhere. Slots beyond the last whole block are never used."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_slots // block_size
        # Blocks from this id on have never been taken: a list of all would be as long as memory.
        self._num_touched = 0
        self._free: list[int] = []

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - self._num_touched + len(self._free)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Ids of ``num_blocks`` blocks, or None where fewer are free."""
        if num_blocks > self.num_free_blocks:
            return None
        left = max(0, len(self._free) - num_blocks)
        taken = self._free[left:]
        del self._free[left:]
        num_new = num_blocks - len(taken)
        taken += range(self._num_touched, self._num_touched + num_new)
        self._num_touched += num_new
        return taken

    def release(self, block_ids: list[int]) -> None:
        self._free += block_ids
        assert len(self._free) <= self._num_touched, "block given back twice"
