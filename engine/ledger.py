"""Who owns each KV block: what `/debug/kv` shows, and the check that nothing is lost.

Conservation (docs/design.md, I4): free + cached + leased + importing + in use = total, a block
counted once, in the first state that applies of importing, in use, leased, cached, free.
"""

from dataclasses import dataclass
from enum import StrEnum

from common.types import BlockCounts, Generation


class BlockState(StrEnum):
    IMPORTING = "importing"
    IN_USE = "in_use"
    LEASED = "leased"
    CACHED = "cached"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class LedgerReference:
    """One reference to a block: ``kind`` is sequence | lease | import, ``owner_id`` the sequence
    id under which it was taken."""

    kind: str
    owner_id: int
    age_s: float


@dataclass(frozen=True, slots=True)
class LedgerBlock:
    block_id: int
    generation: Generation
    state: BlockState
    num_refs: int
    references: tuple[LedgerReference, ...]


@dataclass(frozen=True, slots=True)
class Ledger:
    """Every block that is not free, and the sums. ``leaked`` counts references under the ids of
    owners that the engine does not know any more: 0, or we have a bug."""

    counts: BlockCounts
    blocks: tuple[LedgerBlock, ...]
    leaked: int = 0
