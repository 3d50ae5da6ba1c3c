"""The blocks of one KV pool: who refers to which, and which may be used next.

Life of a block::

    1. free       nobody refers to it, its content is worthless (poisoned in tests)
    2. allocated  to a `Holding` of a sequence or an import; its generation goes up by one
    3. indexed    when its last token is computed and accepted: others may share it from now on
    4. released   when its last reference goes: cached if it is indexed, else free
    5. evicted    a cached block, when no free one is left (engine/cached_blocks.py says which)

Block 0 is the null block: it is never allocated and outside the total. Being full is a value
(``allocate`` returns None); a broken free list or a reference released twice is `CorruptPool`.
"""

import itertools
import time
from array import array
from collections.abc import Callable, Iterable, Sequence, Set
from enum import IntEnum

from common.block_keys import BlockKey, root_key, tenant_key
from common.types import BlockCounts, BlockRef, TokenId
from engine.cached_blocks import CachedBlocks
from engine.ledger import BlockState, Ledger, LedgerBlock, LedgerReference
from engine.prefix_cache import NO_PARENT, PrefixCache, TokenChain


class CorruptPool(RuntimeError):
    """The pool's own books contradict each other: our bug, never an input's."""


class RefKind(IntEnum):
    """What a reference is for. The value is what one such reference adds to a block's packed
    count: three 16-bit counters in one small int."""

    SEQUENCE = 1
    LEASE = 1 << 16
    IMPORT = 1 << 32


_SEQUENCE_MASK = 0xFFFF
_IMPORT = int(RefKind.IMPORT)
# Indices of the counters of referenced states.
_IN_USE, _LEASED, _IMPORTING = range(3)
_STATES = (BlockState.IN_USE, BlockState.LEASED, BlockState.IMPORTING)
_STATE_OF_KIND = {
    RefKind.SEQUENCE: _IN_USE,
    RefKind.LEASE: _LEASED,
    RefKind.IMPORT: _IMPORTING,
}


def _state_of(refs: int) -> int:
    if refs >= _IMPORT:
        return _IMPORTING
    return _IN_USE if refs & _SEQUENCE_MASK else _LEASED


class Holding:
    """The references of one owner, one to each of ``block_ids``; for a sequence this is its block
    table. Only the pool changes it."""

    __slots__ = ("block_ids", "kind", "owner_id", "since_s")

    def __init__(self, kind: RefKind, owner_id: int, since_s: float) -> None:
        self.kind = kind
        self.owner_id = owner_id
        self.since_s = since_s
        self.block_ids: list[int] = []


class BlockPool:
    """Bookkeeping of ``num_blocks`` blocks (the null block included) of ``block_size`` tokens.

    ``fingerprint`` names the model in block keys. ``prefix`` None: nothing is cached.
    ``on_free`` is called with blocks whose content has just become worthless.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        fingerprint: str = "",
        prefix: PrefixCache | None = None,
        on_free: Callable[[Sequence[int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.num_total = num_blocks - 1
        self.fingerprint = fingerprint
        self.prefix = prefix
        self._on_free = on_free
        self._clock = clock
        self._free = list(range(num_blocks - 1, 0, -1))
        self._cached = CachedBlocks(num_blocks)
        self._refs = [0] * num_blocks
        self._generations = array("I", bytes(4 * num_blocks))
        self._allocated_s = array("d", bytes(8 * num_blocks))
        self._holdings: dict[Holding, None] = {}
        self._num_in_state = [0, 0, 0]

    # ------------------------------------------------------------ references

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` could hand out now."""
        return len(self._free) + len(self._cached)

    def hold(self, kind: RefKind, owner_id: int) -> Holding:
        """A new, empty holding; it ends with ``release``."""
        holding = Holding(kind, owner_id, self._clock())
        self._holdings[holding] = None
        return holding

    def allocate(self, holding: Holding, num_blocks: int) -> list[int] | None:
        """Appends fresh blocks to the holding; None, and nothing changes, when there is no room."""
        if num_blocks > self.num_available:
            return None
        now_s = self._clock()
        free, refs, kind = self._free, self._refs, int(holding.kind)
        generations, allocated_s = self._generations, self._allocated_s
        if num_blocks > len(free):
            self._evict(num_blocks - len(free))
        blocks = free[len(free) - num_blocks :][::-1]
        del free[len(free) - num_blocks :]
        for block in blocks:
            if refs[block]:
                raise CorruptPool(f"block {block} is free and has references")
            refs[block] = kind
            generations[block] += 1
            allocated_s[block] = now_s
        self._num_in_state[_STATE_OF_KIND[holding.kind]] += num_blocks
        holding.block_ids += blocks
        return blocks

    def share(self, holding: Holding, blocks: Iterable[int]) -> None:
        """Appends blocks that are cached or referred to by others."""
        revived: list[int] = []
        for block in blocks:
            refs = self._refs[block]
            if refs:
                self._num_in_state[_state_of(refs)] -= 1
            elif block in self._cached:
                revived.append(block)
            else:
                raise CorruptPool(f"block {block} is shared but neither cached nor in use")
            refs += holding.kind
            self._refs[block] = refs
            self._num_in_state[_state_of(refs)] += 1
            holding.block_ids.append(block)
        self._cached.remove(revived)

    def release(self, holding: Holding) -> None:
        """Ends the holding. Blocks without another reference become cached or free, the last of
        the table first, so that a chain is evicted from its end."""
        if holding not in self._holdings:
            raise CorruptPool(f"{holding.kind.name} {holding.owner_id} is released twice")
        del self._holdings[holding]
        freed: list[int] = []
        cached: list[int] = []
        all_refs, kind, counts, prefix = (
            self._refs,
            int(holding.kind),
            self._num_in_state,
            self.prefix,
        )
        state_of_kind = _STATE_OF_KIND[holding.kind]
        for block in reversed(holding.block_ids):
            refs = all_refs[block] - kind
            if refs == 0:
                counts[state_of_kind] -= 1
                if prefix is not None and block in prefix:
                    cached.append(block)
                else:
                    freed.append(block)
            elif refs < 0:
                raise CorruptPool(f"block {block} is released more often than taken")
            else:
                counts[_state_of(refs + kind)] -= 1
                counts[_state_of(refs)] += 1
            all_refs[block] = refs
        holding.block_ids = []
        self._cached.add(cached)
        self._add_free(freed)

    def trim(self, holding: Holding, num_kept: int) -> None:
        """Gives back what the holding has beyond its first ``num_kept`` blocks."""
        rest = self.hold(holding.kind, holding.owner_id)
        rest.block_ids = holding.block_ids[num_kept:]
        del holding.block_ids[num_kept:]
        self.release(rest)

    def convert(self, holding: Holding, kind: RefKind) -> None:
        """Turns all references of the holding into another kind, in place."""
        for block in holding.block_ids:
            refs = self._refs[block]
            self._num_in_state[_state_of(refs)] -= 1
            refs += kind - holding.kind
            self._refs[block] = refs
            self._num_in_state[_state_of(refs)] += 1
        holding.kind = kind
        holding.since_s = self._clock()

    def absorb(self, holding: Holding, source: Holding, at: int) -> None:
        """Moves the blocks of ``source`` into ``holding``'s table at index ``at``; ``source``
        ends."""
        self.convert(source, holding.kind)
        holding.block_ids[at:at] = source.block_ids
        del self._holdings[source]

    def refs_to(self, blocks: Iterable[int]) -> tuple[BlockRef, ...]:
        """The present lives of these blocks."""
        return tuple(BlockRef(block, self._generations[block]) for block in blocks)

    # ------------------------------------------------------------ prefixes

    def chain(self, tenant: str, cache_salt: str) -> TokenChain | None:
        """The keys of a new sequence; None without a prefix cache."""
        if self.prefix is None:
            return None
        root = root_key(self.fingerprint, tenant, cache_salt)
        return TokenChain(root, self.block_size, self.prefix.key_function, tenant_key(tenant))

    def match(
        self, chain: TokenChain | None, token_ids: Sequence[TokenId], max_blocks: int
    ) -> list[int]:
        """Blocks that already hold the start of ``token_ids``; empty without a prefix cache."""
        if self.prefix is None or chain is None:
            return []
        return self.prefix.match(chain, token_ids, max_blocks)

    def parent_after(self, hits: Sequence[int]) -> int:
        """What the block after these matched ones is to be indexed under."""
        if self.prefix is None or not hits:
            return NO_PARENT
        return self.prefix.identity(hits[-1])

    def num_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of these cached blocks would no longer be available once shared."""
        return sum(1 for block in blocks if not self._refs[block])

    def index(
        self, block: int, parent: int, chain: TokenChain, number: int, token_ids: Sequence[TokenId]
    ) -> int:
        """Makes a computed full block, the sequence's ``number``-th, available to others. Returns
        the identity that is the parent of the next. Needs a prefix cache."""
        assert self.prefix is not None
        key, content = chain.entry(number, token_ids)
        generation = self._generations[block]
        identity, displaced = self.prefix.insert(block, generation, parent, key, content)
        if displaced is not None:
            self._uncache(displaced)
        self._cached.tenant_of[block] = chain.tenant
        return identity

    def forget(self, blocks: Iterable[int]) -> None:
        """These blocks' content is not to be trusted: nobody may share them any more."""
        if self.prefix is not None:
            for block in blocks:
                self.prefix.forget(block)
                self._uncache(block)

    def indexed_keys(self, limit: int) -> Iterable[BlockKey]:
        """Keys that are indexed, at most ``limit``: of blocks in use, then the youngest cached."""
        if self.prefix is None:
            return ()
        if len(self.prefix) <= limit:
            return self.prefix.keys()
        cached = self._cached.youngest_first()
        in_use = (block for holding in self._holdings for block in holding.block_ids)
        keys = self.prefix.keys_of(itertools.chain(in_use, cached))
        return list(dict.fromkeys(keys))[:limit]

    def _evict(self, num_blocks: int) -> None:
        assert self.prefix is not None
        evicted = self._cached.pop(num_blocks)
        for block in evicted:
            self.prefix.forget(block)
        self.prefix.num_evictions += num_blocks
        if self._on_free is not None:
            self._on_free(evicted)
        self._free[:0] = evicted

    def _uncache(self, block: int) -> None:
        if block in self._cached:
            self._cached.remove([block])
            self._add_free([block])

    def _add_free(self, blocks: list[int]) -> None:
        if blocks:
            if self._on_free is not None:
                self._on_free(blocks)
            self._free += blocks

    # ------------------------------------------------------------ books

    def counts(self) -> BlockCounts:
        in_use, leased, importing = self._num_in_state
        return BlockCounts(
            total=self.num_total,
            free=len(self._free),
            cached=len(self._cached),
            in_use=in_use,
            leased=leased,
            importing=importing,
        )

    def ledger(self) -> Ledger:
        """Every block that is not free, with each reference to it. Walks the whole pool."""
        now_s = self._clock()
        listed: dict[int, list[LedgerReference]] = {block: [] for block in self._cached}
        for holding in self._holdings:
            kind = holding.kind.name.lower()
            for block in holding.block_ids:
                since_s = max(holding.since_s, self._allocated_s[block])
                reference = LedgerReference(kind, holding.owner_id, now_s - since_s)
                listed.setdefault(block, []).append(reference)
        blocks = tuple(
            LedgerBlock(
                block_id=block,
                generation=self._generations[block],
                state=self._state(block),
                num_refs=self._num_refs(block),
                references=tuple(references),
            )
            for block, references in sorted(listed.items())
        )
        return Ledger(self.counts(), blocks)

    def num_leaked(self, owners: Set[int]) -> int:
        """References of holdings whose owner is none of these."""
        return sum(len(h.block_ids) for h in self._holdings if h.owner_id not in owners)

    def check(self) -> None:
        """Raises CorruptPool unless every block is counted once and every reference is listed.
        About 0.2 us a block."""
        listed = [0] * len(self._refs)
        for holding in self._holdings:
            kind = int(holding.kind)
            for block in holding.block_ids:
                listed[block] += kind
        if listed != self._refs:
            block = next(i for i, refs in enumerate(listed) if refs != self._refs[i])
            raise CorruptPool(
                f"block {block}: refs {self._refs[block]:#x}, listed {listed[block]:#x}"
            )
        in_state = [0, 0, 0]
        for refs in filter(None, listed):
            in_state[_state_of(refs)] += 1
        idle = [*self._free, *self._cached]
        if len(set(idle)) != len(idle) or any(map(listed.__getitem__, idle)):
            raise CorruptPool("a block is free or cached twice, or while it is referred to")
        if self.prefix is not None and not all(map(self.prefix.__contains__, self._cached)):
            raise CorruptPool("a block is cached and not indexed")
        counted = len(idle) + sum(in_state)
        if in_state != self._num_in_state or counted != self.num_total:
            raise CorruptPool(f"{self.counts()}, found {in_state} and {len(idle)} idle ones")

    def _state(self, block: int) -> BlockState:
        refs = self._refs[block]
        if refs:
            return _STATES[_state_of(refs)]
        return BlockState.CACHED if block in self._cached else BlockState.FREE

    def _num_refs(self, block: int) -> int:
        refs = self._refs[block]
        return (refs & 0xFFFF) + (refs >> 16 & 0xFFFF) + (refs >> 32)
