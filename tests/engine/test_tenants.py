"""Whose cached blocks go first, and what routing is told about them."""

import random

import pytest
from support.engines import GREEDY, Rig, prompt_of, spec_of

from common.block_keys import chain_keys, key_prefix, root_key
from engine.block_events import BlockEventLog, BlockEvents
from engine.block_pool import BlockPool, RefKind
from engine.cached_blocks import CachedBlocks
from engine.prefix_cache import NO_PARENT, PrefixCache

BLOCK_SIZE = 4


def cache(pool: BlockPool, tenant: str, num_blocks: int, seed: int) -> None:
    """A sequence of the tenant's comes, computes and goes."""
    ids = [seed * 1000 + i for i in range(num_blocks * BLOCK_SIZE)]
    chain = pool.chain(tenant, "")
    assert chain is not None
    holding = pool.hold(RefKind.SEQUENCE, seed)
    blocks = pool.allocate(holding, num_blocks)
    assert blocks is not None
    parent = NO_PARENT
    for number, block in enumerate(blocks):
        parent = pool.index(block, parent, chain, number, ids)
    pool.release(holding)


def num_hits(pool: BlockPool, tenant: str, num_blocks: int, seed: int) -> int:
    ids = [seed * 1000 + i for i in range(num_blocks * BLOCK_SIZE)]
    return len(pool.match(pool.chain(tenant, ""), ids, num_blocks))


@pytest.mark.parametrize("in_use", [0, 12])
@pytest.mark.fault("V15")
def test_a_flood_drives_out_its_own(in_use: int) -> None:
    """Also where most of the pool is in use."""
    pool = BlockPool(33, BLOCK_SIZE, "m", PrefixCache(33))
    busy = pool.hold(RefKind.SEQUENCE, 999)
    pool.allocate(busy, in_use)
    cache(pool, "modest", 5, seed=1)
    for seed in range(2, 60):
        cache(pool, "flood", 6, seed)
    assert num_hits(pool, "modest", 5, seed=1) == 5
    assert num_hits(pool, "flood", 6, seed=59) == 6
    pool.release(busy)
    pool.check()


def test_within_a_tenant_the_least_recently_used_goes_first() -> None:
    pool = BlockPool(13, BLOCK_SIZE, "m", PrefixCache(13))
    for seed in (1, 2, 3):
        cache(pool, "a", 4, seed)
    cache(pool, "a", 4, seed=4)
    assert [num_hits(pool, "a", 4, seed) for seed in (1, 2, 3, 4)] == [0, 4, 4, 4]


def test_a_newcomer_gets_its_share() -> None:
    pool = BlockPool(25, BLOCK_SIZE, "m", PrefixCache(25))
    for seed in range(6):
        cache(pool, "first", 4, seed)
    for seed in range(6, 12):
        cache(pool, "second", 4, seed)
    kept = sum(num_hits(pool, "first", 4, seed) for seed in range(6))
    assert 10 <= kept <= 12


def test_levels_against_a_plain_model() -> None:
    rng = random.Random(3)
    cached = CachedBlocks(200)
    model: dict[int, list[int]] = {}
    for turn in range(3000):
        action = rng.random()
        inside = [block for blocks in model.values() for block in blocks]
        outside = [block for block in range(200) if block not in inside]
        if action < 0.4 and outside:
            added = rng.sample(outside, min(len(outside), rng.randint(1, 9)))
            for block in added:
                cached.tenant_of[block] = tenant = rng.randint(0, 4)
                model.setdefault(tenant, []).append(block)
            cached.add(added)
        elif action < 0.6 and inside:
            block = rng.choice(inside)
            cached.remove([block])
            model[cached.tenant_of[block]].remove(block)
        elif inside:
            (block,) = cached.pop(1)
            tenant = cached.tenant_of[block]
            assert len(model[tenant]) == max(map(len, model.values()))
            assert model[tenant].pop(0) == block
        assert len(cached) == sum(map(len, model.values()))
        if turn % 100 == 0:
            assert sorted(cached) == sorted(b for blocks in model.values() for b in blocks)
            assert len(cached.youngest_first()) == len(cached)


# ---------------------------------------------------------------- block events


def test_events_are_net() -> None:
    log = BlockEventLog()
    assert not log
    log.note(b"a" * 32, stored=True)
    log.note(b"b" * 32, stored=True)
    log.note(b"a" * 32, stored=False)
    assert log.take() == BlockEvents(stored=(key_prefix(b"b" * 32),))
    log.note(b"b" * 32, stored=False)
    log.note(b"b" * 32, stored=True)
    assert log.take() == BlockEvents()


def test_a_log_that_nobody_reads_stays_small_and_asks_for_a_snapshot() -> None:
    log = BlockEventLog(max_changes=2)
    for i in range(10):
        log.note(bytes([i]) * 32, stored=True)
    assert log.take() == BlockEvents(reset=True)
    log.note(b"x" * 32, stored=True)
    assert log.take().stored == (key_prefix(b"x" * 32),)


def test_whoever_follows_the_events_knows_what_is_cached() -> None:
    rig = Rig(20, max_num_batched_tokens=32)
    known: set[int] = set()
    rng = random.Random(1)
    for turn in range(60):
        prompt = prompt_of(rng.randint(0, 9), rng.randint(4, 24))
        rig.run(spec_of(prompt, GREEDY, tenant=rng.choice("ab")))
        if turn % 3 == 0:
            events = rig.engine.take_block_events()
            assert not known & set(events.stored) and known >= set(events.removed)
            known |= set(events.stored)
            known -= set(events.removed)
            assert known == set(rig.engine.cached_keys())
            assert not rig.engine.has_block_events
    assert rig.engine.statistics().prefix_evictions > 0


def test_keys_are_those_of_common() -> None:
    rig = Rig()
    prompt = prompt_of(1, 12)
    rig.run(spec_of(prompt, GREEDY, tenant="t", cache_salt="s"))
    keys = chain_keys(root_key("oracle", "t", "s"), prompt, BLOCK_SIZE)
    assert {key_prefix(key) for key in keys} <= set(rig.engine.take_block_events().stored)


def test_without_a_prefix_cache_there_are_none() -> None:
    rig = Rig(caching=False)
    rig.run(spec_of(prompt_of(1, 12), GREEDY))
    assert not rig.engine.has_block_events
    assert rig.engine.take_block_events() == BlockEvents()
    assert rig.engine.cached_keys() == ()


def test_a_snapshot_is_bounded_and_keeps_the_youngest() -> None:
    pool = BlockPool(33, BLOCK_SIZE, "m", PrefixCache(33))
    for seed in range(8):
        cache(pool, "a", 4, seed)
    ids = [7 * 1000 + i for i in range(4 * BLOCK_SIZE)]
    youngest = chain_keys(root_key("m", "a", ""), ids, BLOCK_SIZE)
    assert set(pool.indexed_keys(4)) == set(youngest)
    assert len(set(pool.indexed_keys(1000))) == 32
