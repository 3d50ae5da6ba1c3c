"""How a running request gets its slots: the four ways that are compared.

Called by the replay: ``admit`` for the request at the head of the queue, ``grow`` when it has
filled its room, ``release`` when it ends or is preempted.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from cli.kv_waste.allocators import BlockPool, Buddy, FirstFit
from cli.kv_waste.workload import Request, Workload, next_power_of_two
from common.errors import ConfigError


@dataclass(slots=True)
class Holding:
    """Slots of one running request. ``room``: tokens that fit, shared ones among them; ``region``
    and ``blocks``: what it holds alone; ``shared_ids``: prefix segments that it refers to."""

    request: Request
    room: int = 0
    region: int = 0
    blocks: list[int] = field(default_factory=list)
    shared_ids: tuple[int, ...] = ()


class Policy(ABC):
    """``num_allocated`` slots are handed out; ``num_shared`` more would be without sharing."""

    name: str
    num_shared = 0

    def __init__(self, num_slots: int, workload: Workload) -> None:
        self.num_slots = num_slots
        self.workload = workload

    @property
    @abstractmethod
    def num_allocated(self) -> int: ...

    @abstractmethod
    def admit(self, request: Request, num_tokens: int, is_alone: bool) -> Holding | None:
        """Room for a request that has ``num_tokens`` tokens now, or None."""

    @abstractmethod
    def release(self, holding: Holding) -> None: ...

    def grow(self, holding: Holding) -> bool:
        """Room for at least one token more. Contiguous regions hold all that will ever come."""
        raise AssertionError(f"{self.name} does not grow")

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Tokens that this request would have to store, those shared with others not counted."""
        return num_tokens

    def _require(self, num_slots: int, largest: int) -> None:
        if num_slots > largest:
            raise ConfigError(
                "memory",
                f"{self.num_slots} tokens fit, in pieces of at most {largest} ({self.name}), but a "
                f"request of up to {self.workload.max_len} tokens needs {num_slots}; give more "
                "--memory or a smaller --max-len",
            )


class Contiguous(Policy):
    """One region of the maximum length for each request, first fit: Orca (Max) of the
    PagedAttention paper, FasterTransformer, and every engine with one tensor row a request."""

    name = "contiguous"

    def __init__(self, num_slots: int, workload: Workload) -> None:
        super().__init__(num_slots, workload)
        self._memory = FirstFit(num_slots)
        self._require(workload.max_len, num_slots)

    @property
    def num_allocated(self) -> int:
        return self.num_slots - self._memory.num_free

    def admit(self, request: Request, num_tokens: int, is_alone: bool) -> Holding | None:
        size = self.workload.max_len
        start = self._memory.allocate(size)
        return None if start is None else Holding(request, room=size, region=start)

    def release(self, holding: Holding) -> None:
        self._memory.release(holding.region, holding.room)


class PowerOfTwo(Policy):
    """A buddy allocator, and a server that knows each output's length to the next power of two
    before it begins: Orca (Pow2) of the PagedAttention paper (section 6.1). That knowledge flatters
    it. Its region is the prompt and that power of two, rounded up to a power of two."""

    name = "buddy"

    def __init__(self, num_slots: int, workload: Workload) -> None:
        super().__init__(num_slots, workload)
        self._memory = Buddy(num_slots)
        self._require(next_power_of_two(workload.max_len), self._memory.largest)

    @property
    def num_allocated(self) -> int:
        return self.num_slots - self._memory.num_free

    def admit(self, request: Request, num_tokens: int, is_alone: bool) -> Holding | None:
        wanted = request.num_prompt + next_power_of_two(request.num_output)
        size = next_power_of_two(min(wanted, self.workload.max_len))
        start = self._memory.allocate(size)
        return None if start is None else Holding(request, room=size, region=start)

    def release(self, holding: Holding) -> None:
        self._memory.release(holding.region, holding.room)


class Paged(Policy):
    """Blocks on demand: those of the present tokens at admission, then one at a time. A request is
    admitted only while one more block than it takes is free, or when it runs alone."""

    name = "paged"

    def __init__(self, num_slots: int, workload: Workload, block_size: int) -> None:
        super().__init__(num_slots, workload)
        self.pool = BlockPool(num_slots, block_size)
        self.block_size = block_size
        largest = self.pool.num_blocks * block_size
        self._require(self._num_blocks(workload.max_len) * block_size, largest)

    @property
    def num_allocated(self) -> int:
        return (self.pool.num_blocks - self.pool.num_free_blocks) * self.block_size

    def admit(self, request: Request, num_tokens: int, is_alone: bool) -> Holding | None:
        num_blocks = self._num_blocks(num_tokens)
        blocks = self._take(num_blocks, is_alone)
        if blocks is None:
            return None
        return Holding(request, room=num_blocks * self.block_size, blocks=blocks)

    def grow(self, holding: Holding) -> bool:
        block = self.pool.allocate(1)
        if block is None:
            return False
        holding.blocks += block
        holding.room += self.block_size
        return True

    def release(self, holding: Holding) -> None:
        self.pool.release(holding.blocks)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _take(self, num_blocks: int, is_alone: bool) -> list[int] | None:
        if not is_alone and num_blocks >= self.pool.num_free_blocks:
            return None
        return self.pool.allocate(num_blocks)


@dataclass(slots=True)
class _Segment:
    blocks: list[int]
    num_refs: int = 1


class PagedSharing(Paged):
    """Paged, and whole blocks of a common prefix are stored once for all that run at a time. What
    nobody runs any more is dropped at once: a cache would save computing, not memory."""

    name = "paged + sharing"

    def __init__(self, num_slots: int, workload: Workload, block_size: int) -> None:
        super().__init__(num_slots, workload, block_size)
        self._segments: dict[int, _Segment] = {}

    def num_missing(self, request: Request, num_tokens: int) -> int:
        present = (
            self._width(index)
            for index, key in enumerate(request.prefix_ids)
            if key in self._segments
        )
        return num_tokens - sum(present) * self.block_size

    def admit(self, request: Request, num_tokens: int, is_alone: bool) -> Holding | None:
        ids = request.prefix_ids
        widths = {key: self._width(index) for index, key in enumerate(ids)}
        absent = [key for key in ids if key not in self._segments]
        num_common = sum(widths.values())
        num_own = self._num_blocks(num_tokens) - num_common
        taken = self._take(num_own + sum(widths[key] for key in absent), is_alone)
        if taken is None:
            return None
        holding = Holding(request, blocks=taken[:num_own], shared_ids=ids)
        holding.room = (num_own + num_common) * self.block_size
        rest = num_own
        for key in absent:
            self._segments[key] = _Segment(taken[rest : rest + widths[key]], num_refs=0)
            rest += widths[key]
        for key in ids:
            segment = self._segments[key]
            self.num_shared += self.block_size * len(segment.blocks) * (segment.num_refs > 0)
            segment.num_refs += 1
        return holding

    def release(self, holding: Holding) -> None:
        for key in holding.shared_ids:
            segment = self._segments[key]
            segment.num_refs -= 1
            if segment.num_refs:
                self.num_shared -= self.block_size * len(segment.blocks)
            else:
                self.pool.release(self._segments.pop(key).blocks)
        super().release(holding)

    def _width(self, index: int) -> int:
        """Blocks that end inside the prefix's ``index``-th segment."""
        size, segment = self.block_size, self.workload.segment_tokens
        return (index + 1) * segment // size - index * segment // size


def policies(block_size: int) -> list[Callable[[int, Workload], Policy]]:
    """One maker for each of the four, in the order in which they are shown."""
    return [
        Contiguous,
        PowerOfTwo,
        lambda num_slots, workload: Paged(num_slots, workload, block_size),
        lambda num_slots, workload: PagedSharing(num_slots, workload, block_size),
    ]
