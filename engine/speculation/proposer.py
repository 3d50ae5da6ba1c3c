"""What offers drafts: the interface between the speculator and its proposers.

Implementations: `NgramProposer`, `SelfProposer` (the target's first layers) and `DraftProposer`
(a second model). A proposer may be wrong, late or silent, and never changes an answer. All calls
come from the engine thread, between a plan and its launch. ::

    speculator                              once a step, in this order
    ----------                              --------------------------
    proposer.reach(sequence, limit)         for each decode: how many drafts could there be?
    proposer.prepare(asks, num_tokens)      of those that are to have some: who is ready now?
    proposer.propose(asks)                  their drafts
    proposer.forget(seq_id)                 when a sequence ends
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from common.types import SequenceId, TokenId
from engine.sequence import Sequence


@dataclass(slots=True)
class Ask:
    """At most ``num_drafts`` drafts for a sequence, all of whose ``token_ids`` are known and all
    but the last of them computed. Its block table has room for the drafts."""

    sequence: Sequence
    num_drafts: int


class Proposer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def is_free(self) -> bool:
        """Whether a proposal costs next to nothing: then it is made even where it is not verified,
        to learn how often it would have been right."""
        ...

    def reach(self, sequence: Sequence, limit: int) -> int:
        """How many drafts it may have to offer, at most ``limit``."""
        ...

    def prepare(self, asks: Items[Ask], num_tokens: int) -> list[Ask]:
        """Those of ``asks`` for which it can propose now. For the others it may compute up to
        ``num_tokens`` tokens, and will be ready in a later step."""
        ...

    def propose(self, asks: Items[Ask]) -> list[Items[TokenId]]:
        """One proposal an ask, of no more tokens than asked for; it may be empty."""
        ...

    def forget(self, seq_id: SequenceId) -> None:
        """The sequence is over; it may never have been asked about."""
        ...
