"""What speculation tells about itself: one frozen snapshot."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a decode of a step has the drafts that it has."""

    GAIN = "gain"  # they are expected to pay
    PROBE = "probe"  # to find out whether they would
    NO_PROPOSAL = "no_proposal"  # the proposer has nothing to offer
    NO_GAIN = "no_gain"  # they would cost more than they give, or the step is full
    CATCHING_UP = "catching_up"  # the draft model has yet to read the sequence
    NO_ROOM = "no_room"  # no blocks for them
    INVALID = "invalid"  # the proposal was none; ignored


@dataclass(frozen=True, slots=True)
class SpeculationStatistics:
    """Since the start. A *draft* is one proposal that was verified, with one token or more;
    ``num_emitted_tokens`` are the accepted ones and the target's own behind them.
    ``accepted_by_position[i]`` counts drafts whose token i was accepted; ``lengths[k]`` decodes
    that had k drafted tokens; ``reasons`` decodes by why. ``acceptance`` is the present estimate
    for a new sequence, ``proposal_s`` what proposing took."""

    proposer: str
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_emitted_tokens: int
    num_invalid: int
    accepted_by_position: tuple[int, ...]
    lengths: tuple[int, ...]
    reasons: Mapping[Reason, int]
    acceptance: float
    proposal_s: float
