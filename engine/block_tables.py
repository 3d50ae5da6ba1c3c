"""Gives sequences their block tables: a cached prefix is shared, the rest is allocated.

::

    blocks    | hits         | to compute, or importing   | room to grow |
    computed  |------------------->                         first step starts here
    after a hit of the whole sequence the last block is a copy: its last token is computed again

A table is given at once or not at all. *Paged*: all tokens plus one block; what more the output
needs comes one block at a time. *Contiguous*: every sequence that decodes gets the blocks of the
longest possible one, as an engine without paging would reserve; it is there to be compared with.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from common.types import BlockMove, ImportReady
from engine.block_pool import BlockPool, RefKind
from engine.sequence import Sequence


class AllocatorKind(StrEnum):
    PAGED = "paged"
    CONTIGUOUS = "contiguous"


@dataclass(slots=True)
class PrefixCounters:
    """Since the start. A query is one admission of new work, a hit one that found anything;
    recomputation after preemption is neither."""

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0


class BlockTables:
    """``copy_block`` copies one block inside the pool (copy-on-write). ``max_model_len`` counts
    for contiguous tables alone."""

    def __init__(
        self,
        pool: BlockPool,
        kind: AllocatorKind,
        max_model_len: int,
        copy_block: Callable[[int, int], None],
    ) -> None:
        self.counters = PrefixCounters()
        self._pool = pool
        self._kind = kind
        self._max_model_len = max_model_len
        self._copy_block = copy_block

    def fits(self, sequence: Sequence) -> bool:
        """Whether the whole pool could hold the sequence at its longest."""
        most = max(self._blocks_for(sequence.compute_limit), self._blocks_wanted(sequence))
        return most <= self._pool.num_total

    def hits(self, sequence: Sequence) -> list[int]:
        """Cached blocks of its prefix, to be taken before anything else happens to the pool."""
        usable = sequence.num_tokens
        if sequence.is_import:
            usable -= 1  # all its tokens but the last have KV
        elif sequence.wants_prompt_logprobs:
            usable = 0
        max_blocks = usable // self._pool.block_size
        return self._pool.match(sequence.chain, sequence.token_ids, max_blocks)

    def take(self, sequence: Sequence, hits: list[int], watermark: int) -> bool:
        """Gives the sequence its table, if it leaves ``watermark`` blocks available."""
        if sequence.is_import:
            return self._take_for_import(sequence, hits, watermark)
        return self._take_for_prefill(sequence, hits, watermark)

    def is_full(self, sequence: Sequence) -> bool:
        """Whether the next token needs another block."""
        assert sequence.holding is not None
        return sequence.num_computed >= len(sequence.holding.block_ids) * self._pool.block_size

    def grow(self, sequence: Sequence) -> None:
        """The caller knows that a block is available."""
        assert sequence.holding is not None
        blocks = self._pool.allocate(sequence.holding, 1)
        assert blocks is not None

    def extend_for_drafts(self, sequence: Sequence, num_drafts: int) -> tuple[int, int]:
        """Room behind the token to compute next, of blocks that nobody needs now: how many drafts
        fit, ``num_drafts`` at most, and how many blocks were added for them."""
        assert sequence.holding is not None
        num_held = len(sequence.holding.block_ids)
        num_tokens = len(sequence.token_ids)
        missing = max(0, self._blocks_for(num_tokens + num_drafts) - num_held)
        num_added = min(missing, self._pool.num_available)
        if num_added:
            self._pool.allocate(sequence.holding, num_added)
        room = (num_held + num_added) * self._pool.block_size - num_tokens
        return min(num_drafts, room), num_added

    def drop_drafts(self, sequence: Sequence, num_added: int) -> None:
        """Gives back those of the last ``num_added`` blocks in which nothing is left to be."""
        assert sequence.holding is not None
        num_held = len(sequence.holding.block_ids)
        num_kept = max(num_held - num_added, self._blocks_for(len(sequence.token_ids)))
        if num_kept < num_held:
            self._pool.trim(sequence.holding, num_kept)

    def give_back(self, sequence: Sequence) -> None:
        """The whole table of a preempted sequence."""
        assert sequence.holding is not None
        self._pool.release(sequence.holding)
        sequence.forget_kv()

    def index(self, sequence: Sequence) -> bool:
        """Lets others share the blocks whose last token is now computed and accepted; whether
        there are any more of these."""
        if sequence.chain is None:
            return False
        num_full = sequence.num_settled // self._pool.block_size
        if num_full <= sequence.num_indexed:
            return False
        for number in range(sequence.num_indexed, num_full):
            assert sequence.holding is not None
            sequence.block_parent = self._pool.index(
                sequence.holding.block_ids[number],
                sequence.block_parent,
                sequence.chain,
                number,
                sequence.token_ids,
            )
        sequence.num_indexed = num_full
        return True

    def import_ready(self, sequence: Sequence) -> ImportReady:
        """Which blocks are to be copied into."""
        assert sequence.import_holding is not None
        targets = self._pool.refs_to(sequence.import_holding.block_ids)
        first = sequence.num_indexed
        return ImportReady(
            seq_id=sequence.seq_id,
            moves=tuple(BlockMove(first + i, target) for i, target in enumerate(targets)),
            num_cached_tokens=first * self._pool.block_size,
        )

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)

    def _blocks_wanted(self, sequence: Sequence) -> int:
        if self._kind is AllocatorKind.CONTIGUOUS and not sequence.spec.prefill_only:
            return self._blocks_for(self._max_model_len)
        # Never more than it will use in all its life.
        now = self._blocks_for(sequence.num_tokens) + 1
        return min(now, self._blocks_for(sequence.compute_limit))

    def _has_room(self, num_blocks: int, watermark: int) -> bool:
        return num_blocks + watermark <= self._pool.num_available

    def _take_for_prefill(self, sequence: Sequence, hits: list[int], watermark: int) -> bool:
        # The logits of the last token are needed, so a hit must leave it to compute. Where that
        # ends the hit inside a block, the block is copied and the last token written in the copy.
        source = hits.pop() if len(hits) * self._pool.block_size == sequence.num_tokens else None
        num_fresh = self._blocks_wanted(sequence) - len(hits)
        num_revived = self._pool.num_unreferenced(hits)
        if source is not None and not self._has_room(
            num_fresh + num_revived + self._pool.num_unreferenced([source]), watermark
        ):
            source = None
        if not self._has_room(num_fresh + num_revived, watermark):
            return False
        num_hit_tokens = len(hits) * self._pool.block_size
        self._share(sequence, hits)
        assert sequence.holding is not None
        if source is None:
            self._pool.allocate(sequence.holding, num_fresh)
        else:
            num_hit_tokens = sequence.num_tokens - 1
            self._allocate_with_copy(sequence, num_fresh, source)
        self._count_hit(sequence, num_hit_tokens)
        sequence.start_from(num_hit_tokens)
        return True

    def _share(self, sequence: Sequence, hits: list[int]) -> None:
        sequence.num_indexed = len(hits)
        sequence.block_parent = self._pool.parent_after(hits)
        sequence.holding = self._pool.hold(RefKind.SEQUENCE, sequence.seq_id)
        self._pool.share(sequence.holding, hits)

    def _allocate_with_copy(self, sequence: Sequence, num_fresh: int, source: int) -> None:
        assert sequence.holding is not None
        pin = self._pool.hold(RefKind.SEQUENCE, sequence.seq_id)
        self._pool.share(pin, [source])
        blocks = self._pool.allocate(sequence.holding, num_fresh)
        assert blocks is not None
        self._copy_block(source, blocks[0])
        self._pool.release(pin)

    def _take_for_import(self, sequence: Sequence, hits: list[int], watermark: int) -> bool:
        """Room for a handed-off sequence: the blocks of its KV that are not cached are held as
        importing until the copy into them has settled."""
        num_kv_tokens = sequence.num_tokens - 1
        num_covered = self._blocks_for(num_kv_tokens)
        num_wanted = self._blocks_wanted(sequence)
        num_fresh = num_wanted - len(hits) + self._pool.num_unreferenced(hits)
        if not self._has_room(num_fresh, watermark):
            return False
        self._share(sequence, hits)
        assert sequence.holding is not None
        sequence.import_holding = self._pool.hold(RefKind.IMPORT, sequence.seq_id)
        self._pool.allocate(sequence.import_holding, num_covered - len(hits))
        self._pool.allocate(sequence.holding, num_wanted - num_covered)
        self._count_hit(sequence, len(hits) * self._pool.block_size)
        sequence.start_from(num_kv_tokens)
        sequence.num_transferred = sequence.num_prompt - sequence.num_cached
        return True

    def _count_hit(self, sequence: Sequence, num_hit_tokens: int) -> None:
        hit_prompt = min(num_hit_tokens, sequence.num_prompt)
        sequence.num_cached += max(0, hit_prompt - sequence.was_settled)
        if sequence.chain is not None and sequence.num_preemptions == 0:
            self.counters.queries += 1
            self.counters.hits += num_hit_tokens > 0
            self.counters.query_tokens += sequence.num_tokens
            self.counters.hit_tokens += num_hit_tokens
