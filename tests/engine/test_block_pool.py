import time
import tracemalloc

import pytest

from common.types import BlockCounts
from engine.block_pool import BlockPool, CorruptPool, RefKind
from engine.ledger import BlockState
from engine.prefix_cache import NO_PARENT, PrefixCache

BLOCK_SIZE = 4


def make_pool(num_blocks: int = 9, **kwargs: object) -> BlockPool:
    return BlockPool(num_blocks, BLOCK_SIZE, "m", PrefixCache(num_blocks), **kwargs)  # type: ignore[arg-type]


def index_all(pool: BlockPool, blocks: list[int], ids: list[int]) -> None:
    chain = pool.chain("", "")
    assert chain is not None
    parent = NO_PARENT
    for number, block in enumerate(blocks):
        parent = pool.index(block, parent, chain, number, ids)


def match(pool: BlockPool, ids: list[int], tenant: str = "") -> list[int]:
    return pool.match(pool.chain(tenant, ""), ids, len(ids) // BLOCK_SIZE)


def test_full_is_a_value_and_changes_nothing() -> None:
    pool = make_pool()
    holding = pool.hold(RefKind.SEQUENCE, 1)
    assert pool.allocate(holding, 9) is None
    assert pool.counts() == BlockCounts(total=8, free=8, cached=0, in_use=0, leased=0, importing=0)
    blocks = pool.allocate(holding, 8)
    assert blocks is not None
    assert sorted(blocks) == list(range(1, 9)), "the null block is never handed out"
    assert pool.allocate(holding, 1) is None
    pool.release(holding)
    pool.check()


def test_a_generation_is_new_at_each_allocation() -> None:
    pool = make_pool(2)
    generations = []
    for _ in range(3):
        holding = pool.hold(RefKind.SEQUENCE, 1)
        pool.allocate(holding, 1)
        generations += [ref.generation for ref in pool.refs_to(holding.block_ids)]
        pool.release(holding)
    assert generations == [1, 2, 3]


def test_states_in_the_order_of_conservation() -> None:
    pool = make_pool()
    sequence = pool.hold(RefKind.SEQUENCE, 1)
    blocks = pool.allocate(sequence, 2)
    assert blocks is not None
    lease = pool.hold(RefKind.LEASE, 2)
    pool.share(lease, blocks)
    copy = pool.hold(RefKind.IMPORT, 3)
    pool.share(copy, blocks[:1])
    ledger = pool.ledger()
    assert [block.state for block in ledger.blocks] == [BlockState.IMPORTING, BlockState.IN_USE]
    assert [block.num_refs for block in ledger.blocks] == [3, 2]
    assert {ref.kind for ref in ledger.blocks[0].references} == {"sequence", "lease", "import"}
    pool.release(copy)
    pool.release(sequence)
    assert pool.counts().leased == 2
    pool.check()
    pool.release(lease)
    assert pool.counts().free == 8


def test_converting_keeps_blocks_and_changes_their_state() -> None:
    pool = make_pool()
    holding = pool.hold(RefKind.SEQUENCE, 1)
    pool.allocate(holding, 3)
    pool.convert(holding, RefKind.LEASE)
    assert (pool.counts().in_use, pool.counts().leased) == (0, 3)
    pool.check()
    pool.release(holding)
    pool.check()


def test_absorbing_puts_imported_blocks_into_their_place() -> None:
    pool = make_pool()
    table = pool.hold(RefKind.SEQUENCE, 1)
    copied = pool.hold(RefKind.IMPORT, 1)
    (first, last) = pool.allocate(table, 2) or ()
    middle = pool.allocate(copied, 2) or []
    assert pool.counts().importing == 2
    pool.absorb(table, copied, at=1)
    assert table.block_ids == [first, *middle, last]
    assert (pool.counts().importing, pool.counts().in_use) == (0, 4)
    pool.check()
    pool.release(table)
    assert pool.counts().free == 8


def test_the_ledger_tells_ages() -> None:
    now_s = 10.0
    pool = make_pool(clock=lambda: now_s)
    holding = pool.hold(RefKind.SEQUENCE, 5)
    pool.allocate(holding, 1)
    now_s = 12.0
    pool.allocate(holding, 1)
    now_s = 15.0
    references = [block.references[0] for block in pool.ledger().blocks]
    assert [(ref.owner_id, ref.age_s) for ref in references] == [(5, 5.0), (5, 3.0)]


def test_a_released_indexed_block_is_cached_and_found_again() -> None:
    pool = make_pool()
    ids = list(range(8))
    holding = pool.hold(RefKind.SEQUENCE, 1)
    blocks = pool.allocate(holding, 3) or []
    index_all(pool, blocks[:2], ids)
    pool.release(holding)
    assert (pool.counts().cached, pool.counts().free) == (2, 6)
    assert match(pool, ids) == blocks[:2]
    assert match(pool, [*ids[:4], 9, 9, 9, 9]) == blocks[:1]
    assert match(pool, [9, *ids[1:]]) == []
    assert match(pool, ids, tenant="other") == []
    again = pool.hold(RefKind.SEQUENCE, 2)
    pool.share(again, blocks[:2])
    assert pool.counts().in_use == 2
    pool.release(again)
    pool.check()


def test_the_least_recently_used_chain_is_evicted_from_its_end() -> None:
    freed: list[int] = []
    pool = make_pool(5, on_free=freed.extend)
    old, new = list(range(8)), list(range(100, 108))
    tables = []
    for ids in (old, new):
        holding = pool.hold(RefKind.SEQUENCE, 1)
        tables.append(pool.allocate(holding, 2) or [])
        index_all(pool, tables[-1], ids)
        pool.release(holding)
    holding = pool.hold(RefKind.SEQUENCE, 2)
    assert pool.allocate(holding, 1) == [tables[0][1]]
    assert freed == [tables[0][1]]
    assert match(pool, old) == tables[0][:1]
    assert match(pool, new) == tables[1]
    pool.check()


def test_forgotten_blocks_are_never_hit_again() -> None:
    pool = make_pool()
    ids = list(range(8))
    holding = pool.hold(RefKind.SEQUENCE, 1)
    blocks = pool.allocate(holding, 2) or []
    index_all(pool, blocks, ids)
    pool.forget(blocks)
    assert match(pool, ids) == []
    pool.release(holding)
    assert pool.counts().free == 8
    pool.check()


def test_equal_content_is_indexed_once_and_children_hang_on_the_indexed_one() -> None:
    pool = make_pool()
    ids = list(range(8))
    one, two = pool.hold(RefKind.SEQUENCE, 1), pool.hold(RefKind.SEQUENCE, 2)
    first, second = pool.allocate(one, 1) or [], pool.allocate(two, 2) or []
    index_all(pool, first, ids)
    index_all(pool, second, ids)
    assert match(pool, ids) == [first[0], second[1]]
    pool.release(one)
    pool.release(two)
    assert (pool.counts().cached, pool.counts().free) == (2, 6)
    pool.check()


@pytest.mark.fault("V13")
def test_all_keys_equal_never_gives_another_prefix() -> None:
    pool = BlockPool(9, BLOCK_SIZE, "m", PrefixCache(9, lambda parent, ids: b"same"))
    ids = [1, 2, 3, 4, 1, 2, 3, 4]
    holding = pool.hold(RefKind.SEQUENCE, 1)
    blocks = pool.allocate(holding, 2) or []
    chain = pool.chain("", "")
    assert chain is not None
    pool.index(blocks[0], NO_PARENT, chain, 0, ids)
    assert match(pool, ids) == [blocks[0]], "the second block repeats ids, not the prefix"
    assert match(pool, [5, *ids]) == []
    assert match(pool, ids, tenant="other") == []
    pool.index(blocks[1], pool.parent_after(blocks[:1]), chain, 1, ids)
    assert match(pool, ids) == []
    pool.release(holding)
    pool.check()


@pytest.mark.fault("V13")
def test_colliding_keys_under_other_parents_never_match() -> None:
    pool = BlockPool(9, BLOCK_SIZE, "m", PrefixCache(9, lambda parent, ids: ids))
    one, other = [1, 1, 1, 1, 9, 9, 9, 9], [2, 2, 2, 2, 9, 9, 9, 9]
    holding = pool.hold(RefKind.SEQUENCE, 1)
    blocks = pool.allocate(holding, 3) or []
    index_all(pool, blocks[:2], one)
    index_all(pool, blocks[2:], other)
    assert match(pool, one) == blocks[:2]
    assert match(pool, other) == blocks[2:]
    pool.release(holding)
    pool.check()


def test_broken_books_are_an_exception() -> None:
    pool = make_pool()
    holding = pool.hold(RefKind.SEQUENCE, 1)
    (block, _) = pool.allocate(holding, 2) or ()
    with pytest.raises(CorruptPool):
        pool.share(pool.hold(RefKind.SEQUENCE, 2), [7])
    pool._free.append(block)
    with pytest.raises(CorruptPool):
        pool.check()
    with pytest.raises(CorruptPool):
        pool.allocate(holding, 1)
    pool.release(holding)
    with pytest.raises(CorruptPool):
        pool.release(holding)


def test_bookkeeping_is_small_and_quick() -> None:
    num_blocks = 20_000
    tracemalloc.start()
    pool = make_pool(num_blocks + 1)
    chain = pool.chain("", "")
    assert chain is not None
    ids = list(range(16))
    holding = pool.hold(RefKind.SEQUENCE, 1)
    blocks = pool.allocate(holding, num_blocks) or []
    for number, block in enumerate(blocks):
        ids = list(range(number, number + BLOCK_SIZE))
        one = pool.chain("", str(number))
        assert one is not None
        pool.index(block, NO_PARENT, one, 0, ids)
    pool.release(holding)
    del chain, one, blocks, holding
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pool.counts().cached == num_blocks
    assert num_bytes / num_blocks < 600

    pool = make_pool(num_blocks + 1)
    durations_s = []
    for _ in range(3):
        started_s = time.process_time()
        for _ in range(num_blocks // 50):
            holding = pool.hold(RefKind.SEQUENCE, 1)
            pool.allocate(holding, 50)
            pool.release(holding)
        durations_s.append(time.process_time() - started_s)
    assert min(durations_s) / num_blocks < 2e-6
