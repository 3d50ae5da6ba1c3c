"""The cached blocks of a pool that nobody refers to, and which of them goes first.

Each block belongs to the tenant whose sequence computed it. When one has to go, it is the least
recently released one of the tenant that has most here: so while anyone has more than an equal share
of what is cached, only such a tenant loses blocks, and a tenant that floods the pool drives out its
own. With one tenant that is plain LRU.

Tenants stand on *levels* by how many blocks they have; the top level is where blocks are taken
from. A block moves its tenant by one level, so everything is O(1) amortised however many tenants
there are.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

# 64 bits of a hash over the tenant's name; tenants whose hashes collide share a share.
TenantKey = int


class CachedBlocks:
    """Of a pool of ``num_blocks``. ``tenant_of`` holds for each block whose it is; the pool writes
    it when a block is indexed, before it comes here."""

    def __init__(self, num_blocks: int) -> None:
        self.tenant_of = array("Q", bytes(8 * num_blocks))
        self._num_blocks = 0
        # Of each tenant with any, the least recently released first.
        self._by_tenant: dict[TenantKey, OrderedDict[int, None]] = {}
        self._levels: dict[int, dict[TenantKey, None]] = {}
        self._top = 0

    def __len__(self) -> int:
        return self._num_blocks

    def __contains__(self, block: int) -> bool:
        blocks = self._by_tenant.get(self.tenant_of[block])
        return blocks is not None and block in blocks

    def __iter__(self) -> Iterator[int]:
        for blocks in self._by_tenant.values():
            yield from blocks

    def youngest_first(self) -> list[int]:
        """All of them, the most recently released of each tenant in front."""
        ranked = [
            (rank, block)
            for blocks in self._by_tenant.values()
            for rank, block in enumerate(reversed(blocks))
        ]
        return [block for _, block in sorted(ranked)]

    def add(self, blocks: Sequence[int]) -> None:
        """These were just released, in this order."""
        for tenant, its_blocks in self._runs(blocks):
            mine = self._by_tenant.setdefault(tenant, OrderedDict())
            num_before = len(mine)
            for block in its_blocks:
                mine[block] = None
            self._move(tenant, num_before, len(mine))

    def remove(self, blocks: Sequence[int]) -> None:
        """They are referred to again, or worthless. KeyError for one that is not here."""
        for tenant, its_blocks in self._runs(blocks):
            mine = self._by_tenant[tenant]
            num_before = len(mine)
            for block in its_blocks:
                del mine[block]
            self._move(tenant, num_before, len(mine))

    def pop(self, num_blocks: int) -> list[int]:
        """The blocks that are to go, of those here."""
        gone: list[int] = []
        while (rest := num_blocks - len(gone)) > 0:
            tenant, num_taken = self._richest(rest)
            mine = self._by_tenant[tenant]
            num_before = len(mine)
            gone += [mine.popitem(last=False)[0] for _ in range(num_taken)]
            self._move(tenant, num_before, len(mine))
        return gone

    def _richest(self, rest: int) -> tuple[TenantKey, int]:
        """Who is to give, and how many at once: its part of ``rest`` among those who have as much,
        but not past the next level. The search for that takes no longer than taking the blocks."""
        highest = self._levels[self._top]
        most = max(1, rest // len(highest))
        gap = 1
        while gap < most and self._top - gap not in self._levels:
            gap += 1
        return next(iter(highest)), min(gap, self._top)

    def _runs(self, blocks: Sequence[int]) -> Iterator[tuple[TenantKey, Sequence[int]]]:
        """Cut where the tenant changes, which is almost never: most are of one sequence."""
        tenant_of, start = self.tenant_of, 0
        for end in range(1, len(blocks) + 1):
            tenant = tenant_of[blocks[start]]
            if end == len(blocks) or tenant_of[blocks[end]] != tenant:
                yield tenant, blocks[start:end]
                start = end

    def _move(self, tenant: TenantKey, before: int, after: int) -> None:
        """The tenant now has ``after`` blocks."""
        levels = self._levels
        self._num_blocks += after - before
        if before:
            level = levels[before]
            del level[tenant]
            if not level:
                del levels[before]
        if after:
            levels.setdefault(after, {})[tenant] = None
        else:
            del self._by_tenant[tenant]
        self._top = max(self._top, after)
        while self._top and self._top not in levels:
            self._top -= 1
