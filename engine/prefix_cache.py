"""Which blocks hold which prefix: an index from block key to block, exact even if keys collide.

An entry is found by its key and believed only when its own content says the same: the block's ids
are equal and its parent is the very block that matched before it (same block, same generation). By
induction the whole prefix is equal, whatever the hash function does. The first block's content
includes the root key, so that tenants and models never share.

When a parent is evicted before its child, the child can no longer be reached; it leaves the index
when its key is registered anew or when it is the least recently used.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence

from common.block_keys import BlockKey, block_key, pack_ids
from common.types import TokenId
from engine.block_events import BlockEventLog

KeyFunction = Callable[[BlockKey, bytes], BlockKey]

# Parent of a first block. Identities are (generation << 32 | block id); generations start at 1.
NO_PARENT = 0


class TokenChain:
    """Keys and packed ids of one sequence's full blocks, computed as they are first asked for.
    ``tenant`` is whose blocks they are, see engine/cached_blocks.py."""

    __slots__ = ("_block_size", "_key_function", "_keys", "_packed", "_root", "tenant")

    def __init__(
        self, root: BlockKey, block_size: int, key_function: KeyFunction, tenant: int
    ) -> None:
        self.tenant = tenant
        self._root = root
        self._block_size = block_size
        self._key_function = key_function
        self._keys: list[BlockKey] = []
        self._packed: list[bytes] = []

    def entry(self, index: int, token_ids: Sequence[TokenId]) -> tuple[BlockKey, bytes]:
        """Key and content of full block ``index`` of the sequence whose ids are ``token_ids``."""
        while len(self._keys) <= index:
            number = len(self._keys)
            start = number * self._block_size
            packed = pack_ids(token_ids[start : start + self._block_size])
            parent = self._keys[-1] if number else self._root
            self._keys.append(self._key_function(parent, packed))
            self._packed.append(packed if number else self._root + packed)
        return self._keys[index], self._packed[index]


class PrefixCache:
    """The index of one pool. ``key_function`` is another one in tests only."""

    def __init__(self, num_blocks: int, key_function: KeyFunction = block_key) -> None:
        self.key_function = key_function
        self.num_evictions = 0
        self.events = BlockEventLog()
        self._index: dict[BlockKey, int] = {}
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._contents: list[bytes | None] = [None] * num_blocks
        self._identities = array("Q", bytes(8 * num_blocks))
        self._parents = array("Q", bytes(8 * num_blocks))

    def __contains__(self, block: int) -> bool:
        return self._keys[block] is not None

    def __len__(self) -> int:
        return len(self._index)

    def keys(self) -> Iterable[BlockKey]:
        """Of all indexed blocks."""
        return self._index.keys()

    def keys_of(self, blocks: Iterable[int]) -> list[BlockKey]:
        """Of those of these blocks that are indexed."""
        return [key for block in blocks if (key := self._keys[block]) is not None]

    def match(self, chain: TokenChain, token_ids: Sequence[TokenId], max_blocks: int) -> list[int]:
        """Blocks that hold the longest cached prefix, at most ``max_blocks``."""
        blocks: list[int] = []
        parent = NO_PARENT
        for number in range(max_blocks):
            key, content = chain.entry(number, token_ids)
            block = self._index.get(key)
            if block is None or not self._is(block, parent, content):
                break
            blocks.append(block)
            parent = self._identities[block]
        return blocks

    def identity(self, block: int) -> int:
        """Names this life of an indexed block; what its children know as their parent."""
        return self._identities[block]

    def insert(
        self, block: int, generation: int, parent: int, key: BlockKey, content: bytes
    ) -> tuple[int, int | None]:
        """Indexes a block whose last token was just accepted. Returns the identity under which
        its children are to be registered (that of an equal block, if one is indexed already) and
        the block that had to leave the index for it, if any."""
        displaced = self._index.get(key)
        if displaced is not None:
            if self._is(displaced, parent, content):
                return self._identities[displaced], None
            self.forget(displaced)
        identity = generation << 32 | block
        self._index[key] = block
        self._keys[block] = key
        self._contents[block] = content
        self._identities[block] = identity
        self._parents[block] = parent
        self.events.note(key, stored=True)
        return identity, displaced

    def forget(self, block: int) -> None:
        """The block leaves the index, if it is there."""
        key = self._keys[block]
        if key is not None:
            del self._index[key]
            self._keys[block] = None
            self._contents[block] = None
            self.events.note(key, stored=False)

    def _is(self, block: int, parent: int, content: bytes) -> bool:
        return self._parents[block] == parent and self._contents[block] == content
