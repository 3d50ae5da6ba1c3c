"""The run of one request inside this engine.

One counter instead of phases: ``num_computed`` chases ``num_tokens``. ::

    token_ids      | prompt ids | output ids |            collected, all ids known
    num_tokens     |--------------------------|+ in flight|   sampled by steps not yet collected
    num_computed   |------------------------->            |   scheduled so far (launched or done)
    num_settled    |------------------>                       collected: may be indexed and shared
    compute_limit  positions that will ever be computed; the last sampled token never is

A row with d drafts counts as computed up to its last draft, and ``num_tokens`` stays there: how
many tokens follow is known when it is collected, and until then nothing of this sequence is
scheduled. Then both step back over the drafts that were not accepted.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Ids
from enum import Enum, auto

from common.types import (
    FinishReason,
    SequenceCounts,
    SequenceId,
    SequenceSpec,
    TokenId,
    TokenLogprobs,
)
from engine.block_pool import Holding
from engine.prefix_cache import NO_PARENT, TokenChain


def num_accepted(drafts: Ids[TokenId], sampled: Ids[TokenId]) -> int:
    """How many drafts, from the first, equal the target's own choice; the choice behind the last
    of them is good as well, so one of ``sampled`` is always left for it."""
    limit = min(len(drafts), len(sampled) - 1)
    for index in range(limit):
        if drafts[index] != sampled[index]:
            return index
    return limit


class Status(Enum):
    NEW = auto()
    WAITING = auto()
    FOLLOWING = auto()
    IMPORTING = auto()
    RUNNING = auto()
    ENDED = auto()


class Sequence:
    """State of one sequence. ``order`` grows with each sequence added to the engine."""

    __slots__ = (
        "block_parent",
        "chain",
        "compute_limit",
        "counts",
        "decode_since_s",
        "first_decode",
        "has_penalties",
        "holding",
        "import_holding",
        "is_import",
        "num_accepted",
        "num_cached",
        "num_computed",
        "num_drafted",
        "num_fresh_computed",
        "num_indexed",
        "num_preemptions",
        "num_prompt",
        "num_recomputed",
        "num_rows_in_flight",
        "num_settled",
        "num_tokens",
        "num_transferred",
        "order",
        "prefill_s",
        "prompt_logprobs",
        "queue_s",
        "seq_id",
        "since_s",
        "spec",
        "status",
        "token_ids",
        "token_limit",
        "wants_prompt_logprobs",
        "was_settled",
    )

    def __init__(
        self,
        spec: SequenceSpec,
        chain: TokenChain | None,
        order: int,
        max_model_len: int,
        now_s: float,
        is_import: bool,
    ) -> None:
        params = spec.params
        self.spec = spec
        self.seq_id: SequenceId = spec.seq_id
        self.chain = chain
        self.order = order
        self.status = Status.NEW
        self.is_import = is_import
        self.token_ids: list[TokenId] = [*spec.prompt_ids, *spec.output_ids]
        self.num_prompt, self.num_tokens = len(spec.prompt_ids), spec.num_tokens
        self.token_limit = min(self.num_prompt + params.max_tokens, max_model_len)
        self.compute_limit = max(self.num_prompt, self.token_limit - 1)
        # From here on every position is computed once, by its decode step.
        self.first_decode = max(self.num_tokens - 1, self.num_prompt)
        if spec.prefill_only:
            self.compute_limit = min(self.compute_limit, self.num_tokens)
        self.has_penalties = params.has_penalties
        self.wants_prompt_logprobs = params.prompt_logprobs is not None and not spec.output_ids
        self.prompt_logprobs: list[TokenLogprobs] = []

        self.num_computed = 0
        self.num_settled = 0
        self.num_rows_in_flight = 0
        # Positions computed, or received, at least once: below it work is recomputation.
        self.was_settled = 0
        self.holding: Holding | None = None
        self.import_holding: Holding | None = None
        self.num_indexed = 0
        self.block_parent = NO_PARENT

        self.counts = SequenceCounts()
        self.num_fresh_computed = 0
        self.num_cached = 0
        self.num_transferred = 0
        self.num_recomputed = 0
        self.num_preemptions = 0
        self.num_drafted = 0
        self.num_accepted = 0
        # When the present phase (waiting, prefill) began; ``decode_since_s`` None: no token yet.
        self.since_s = now_s
        self.queue_s = 0.0
        self.prefill_s = 0.0
        self.decode_since_s: float | None = None

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def queue_key(self) -> tuple[bool, int, int]:
        """Order among the waiting: resumes before new work, then by priority and age."""
        return (self.num_preemptions == 0, self.spec.priority, self.order)

    @property
    def samples(self) -> bool:
        """False for a request of prompt log-probabilities only."""
        return self.spec.params.max_tokens > 0

    def num_pending(self) -> int:
        """Tokens that a step could compute now."""
        end = self.num_tokens if self.num_tokens < self.compute_limit else self.compute_limit
        return end - self.num_computed

    def accept(self, token_id: TokenId) -> FinishReason | None:
        """Appends a sampled token and tells whether the sequence ends with it."""
        self.token_ids.append(token_id)
        params = self.spec.params
        if token_id in params.stop_token_ids and self.num_output >= params.min_tokens:
            return FinishReason.STOP
        if len(self.token_ids) >= self.token_limit:
            return FinishReason.LENGTH
        return None

    def draft(self, num_drafts: int) -> None:
        """Its decode row of the step being planned verifies this many drafts."""
        self.num_computed += num_drafts
        self.num_tokens = self.num_computed

    def verify(
        self, drafts: Ids[TokenId], sampled: Ids[TokenId]
    ) -> tuple[tuple[TokenId, ...], FinishReason | None]:
        """Takes what a row with drafts sampled: appends the target's own choices up to the first
        that its draft was not equal to, or that ends the sequence, and returns them.

        The number of them is also that of the row's positions whose KV is good. ``sampled`` has
        one id a position, or fewer where a later position could not be computed."""
        num_equal = num_accepted(drafts, sampled)
        reason = None
        num_kept = 0
        while reason is None and num_kept <= num_equal:
            reason = self.accept(sampled[num_kept])
            num_kept += 1
        self.num_computed = len(self.token_ids) - 1
        self.num_tokens = len(self.token_ids)
        self.num_drafted += len(drafts)
        self.num_accepted += num_kept - 1
        return tuple(sampled[:num_kept]), reason

    def add_prompt_logprobs(self, start: int, logprobs: Iterable[TokenLogprobs]) -> None:
        """Those that a chunk beginning at ``start`` gave; the first prompt token has none."""
        if start == 0:
            first = TokenLogprobs(self.token_ids[0], logprob=None, rank=0)
            self.prompt_logprobs.append(first)
        self.prompt_logprobs += logprobs

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """All of them, with the first output; after it they are not made again."""
        self.wants_prompt_logprobs = False
        taken, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return taken

    def settle(self, end: int) -> None:
        """Positions up to ``end`` were computed and collected: count them by kind."""
        start = self.num_settled
        self.num_settled = end
        first_decode = self.first_decode
        if start >= first_decode and start >= self.was_settled:
            self.was_settled = end
            return
        again = max(0, min(end, self.was_settled) - start)
        fresh_start = max(start, self.was_settled)
        fresh = max(0, min(end, self.num_prompt) - fresh_start)
        resumed = max(0, min(end, first_decode) - max(fresh_start, self.num_prompt))
        self.num_fresh_computed += fresh
        self.num_recomputed += again + resumed
        self.was_settled = max(self.was_settled, end)

    def start_from(self, num_tokens: int) -> None:
        """The KV of the first ``num_tokens`` is in the block table already."""
        self.num_computed = num_tokens
        self.num_settled = num_tokens
        self.was_settled = max(self.was_settled, num_tokens)

    def forget_kv(self) -> None:
        """The block table is gone; the tokens are kept and everything is to be computed again."""
        self.holding = None
        self.num_computed = 0
        self.num_settled = 0
        self.num_indexed = 0
        self.block_parent = NO_PARENT
        self.is_import = False
        self.prompt_logprobs.clear()

    def update_counts(self, now_s: float) -> SequenceCounts:
        """A new snapshot of what the sequence cost so far: with its first output and its last."""
        if self.decode_since_s is None:
            self.prefill_s = now_s - self.since_s
            self.decode_since_s = now_s
        self.counts = SequenceCounts(
            computed=self.num_fresh_computed,
            cached=self.num_cached,
            transferred=self.num_transferred,
            recomputed=self.num_recomputed,
            preemptions=self.num_preemptions,
            drafted=self.num_drafted,
            accepted=self.num_accepted,
            queue_s=self.queue_s,
            prefill_s=self.prefill_s,
            decode_s=now_s - self.decode_since_s,
        )
        return self.counts
