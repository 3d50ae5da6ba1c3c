"""Random operations on a pool, the books checked after each."""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool, Holding, RefKind
from engine.ledger import BlockState
from engine.prefix_cache import NO_PARENT, PrefixCache

NUM_BLOCKS = 13
BLOCK_SIZE = 2
# Few ids, so that prefixes repeat.
ids_lists = st.lists(st.integers(0, 1), min_size=1, max_size=12)
kinds = st.sampled_from(RefKind)
tenants = st.sampled_from(["a", "b", "c"])


class PoolMachine(RuleBasedStateMachine):
    """Sequences take blocks, write known ids into them, share, lease, import and release. The
    model is what each block was last written with: a hit must show exactly the ids asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: set[int] = set()
        self.pool = BlockPool(
            NUM_BLOCKS, BLOCK_SIZE, "m", PrefixCache(NUM_BLOCKS), self.freed.update
        )
        self.holdings: list[Holding] = []
        self.contents: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.last_generation: dict[int, int] = {}

    def _pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.holdings) - 1))

    def _took(self, blocks: list[int]) -> None:
        for ref in self.pool.refs_to(blocks):
            assert ref.generation > self.last_generation.get(ref.block_id, 0)
            self.last_generation[ref.block_id] = ref.generation
            self.contents.pop(ref.block_id, None)
            self.freed.discard(ref.block_id)

    def _allocate(self, holding: Holding, num_blocks: int) -> list[int] | None:
        """What is evicted for it comes from whoever has most cached."""
        before = self._cached_by_tenant()
        blocks = self.pool.allocate(holding, num_blocks)
        after = self._cached_by_tenant()
        highest = max(after.values(), default=0)
        for tenant, num_cached in before.items():
            if after[tenant] < num_cached:
                assert after[tenant] >= highest - 1, (before, after)
        return blocks

    def _cached_by_tenant(self) -> Counter[str]:
        blocks = self.pool.ledger().blocks
        cached = [block.block_id for block in blocks if block.state is BlockState.CACHED]
        return Counter(self.contents[block][0] for block in cached)

    @rule(ids=ids_lists, tenant=tenants)
    def run_a_sequence(self, ids: list[int], tenant: str) -> None:
        """Takes hits, allocates the rest, computes and indexes all full blocks."""
        pool, chain = self.pool, self.pool.chain(tenant, "")
        assert chain is not None
        num_full = len(ids) // BLOCK_SIZE
        hits = pool.match(chain, ids, num_full)
        for number, block in enumerate(hits):
            assert self.contents[block] == (tenant, tuple(ids[: (number + 1) * BLOCK_SIZE]))
        holding = pool.hold(RefKind.SEQUENCE, 1)
        parent = pool.parent_after(hits)
        pool.share(holding, hits)
        fresh = self._allocate(holding, -(-len(ids) // BLOCK_SIZE) - len(hits))
        if fresh is None:
            pool.release(holding)
            return
        self._took(fresh)
        for number in range(len(hits), num_full):
            block = holding.block_ids[number]
            self.contents[block] = (tenant, tuple(ids[: (number + 1) * BLOCK_SIZE]))
            parent = pool.index(block, parent, chain, number, ids)
        self.holdings.append(holding)

    @rule(kind=kinds, num_blocks=st.integers(0, 6))
    def allocate(self, kind: RefKind, num_blocks: int) -> None:
        holding = self.pool.hold(kind, 2)
        available = self.pool.num_available
        blocks = self._allocate(holding, num_blocks)
        assert (blocks is None) == (num_blocks > available)
        self._took(blocks or [])
        self.holdings.append(holding)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data(), kind=kinds)
    def share(self, data: st.DataObject, kind: RefKind) -> None:
        source = self.holdings[self._pick(data)]
        holding = self.pool.hold(kind, 3)
        self.pool.share(holding, source.block_ids)
        self.holdings.append(holding)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data(), kind=kinds)
    def convert(self, data: st.DataObject, kind: RefKind) -> None:
        self.pool.convert(self.holdings[self._pick(data)], kind)

    @precondition(lambda self: len(self.holdings) > 1)
    @rule(data=st.data())
    def absorb(self, data: st.DataObject) -> None:
        source = self.holdings.pop(self._pick(data))
        holding = self.holdings[self._pick(data)]
        self.pool.absorb(holding, source, at=len(holding.block_ids))

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.holdings.pop(self._pick(data)))

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.pool.forget(self.holdings[self._pick(data)].block_ids)

    @invariant()
    def conserved(self) -> None:
        self.pool.check()
        held = {block for holding in self.holdings for block in holding.block_ids}
        counts = self.pool.counts()
        assert counts.in_use + counts.leased + counts.importing == len(held)
        assert not held & self.freed, "a block that is referred to was called worthless"

    def teardown(self) -> None:
        for holding in self.holdings:
            self.pool.release(holding)
        self.pool.check()
        assert self.pool.num_available == NUM_BLOCKS - 1


# 200 runs of 50 operations.
TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_no_parent_is_no_identity() -> None:
    pool = BlockPool(2, BLOCK_SIZE, "m", PrefixCache(2))
    assert pool.parent_after([]) == NO_PARENT
