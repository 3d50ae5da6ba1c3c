"""Drafts from the target's own first layers, followed by its norm and head (``self:N``).

Elhoushi et al. 2024, LayerSkip (arXiv 2404.16710), section 4.3. The first N layers see what they
always see, so they read the target's blocks, and what they write there for a draft is what the
target itself writes when it verifies that draft: no cache of its own, no prefill, no memory beyond
the drafts' slots. It pays for models that were trained to be left early; others accept little.
"""

from collections.abc import Sequence as Items

from common.types import SequenceId, TokenId
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.speculation.proposer import Ask
from engine.speculation.rounds import Proposal, run_rounds


class SelfProposer:
    """``runner`` computes the first ``num_layers`` layers over the target's own pool."""

    is_free = False

    def __init__(self, runner: ModelRunner, num_layers: int) -> None:
        self.name = f"self:{num_layers}"
        self._runner = runner

    def reach(self, sequence: Sequence, limit: int) -> int:
        return limit

    def prepare(self, asks: Items[Ask], num_tokens: int) -> list[Ask]:
        return list(asks)

    def propose(self, asks: Items[Ask]) -> list[Items[TokenId]]:
        proposals = []
        for ask in asks:
            sequence = ask.sequence
            assert sequence.holding is not None
            start = len(sequence.token_ids) - 1
            block_ids = sequence.holding.block_ids
            proposals.append(Proposal(sequence, ask.num_drafts, start, block_ids))
        run_rounds(self._runner, proposals)
        return [proposal.drafts for proposal in proposals]

    def forget(self, seq_id: SequenceId) -> None:
        """It keeps nothing."""
