"""The vocabulary: what the packages hand to each other, as frozen dataclasses.

Everyone imports this module and it imports nobody. Words are those of docs/design.md: a *request*
is what the user sent, a *sequence* its run inside one engine, an *attempt* one try of the gateway
to have it run. Counts are ``num_*``, durations ``*_s`` (``*_ms`` on the wire), sizes ``*_bytes``.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

TokenId = int
WorkerId = str
RequestId = str
Epoch = int
Generation = int
# An engine's own name for a sequence, unique for the life of the engine process.
SequenceId = NewType("SequenceId", int)


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class LocalPrefill(StrEnum):
    """When a decode worker computes prompts itself; ``ALWAYS`` is role `both`."""

    NEVER = "never"
    AUTO = "auto"
    ALWAYS = "always"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


# ---------------------------------------------------------------- sampling


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, every default filled in. Order of use as in vLLM.

    ``stop_token_ids`` holds the model's eos ids too, unless the request ignores them.
    ``top_k`` 0 is off. ``logprobs`` None is off, k gives the chosen token and the k most likely.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop_token_ids: tuple[TokenId, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[TokenId, float], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change what the next one may be."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the raw logits at one position; ``logprob`` None for the first prompt
    token. ``rank`` is 1 for the most likely token; ``top`` is sorted, most likely first."""

    token_id: TokenId
    logprob: float | None
    rank: int
    top: tuple[tuple[TokenId, float], ...] = ()


# ---------------------------------------------------------------- model and KV layout


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a worker serves; two workers with different fingerprints are never paired."""

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[TokenId, ...] = ()


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one block: ``[num_layers, 2, block_size, num_kv_heads, head_size]`` of ``dtype``,
    one contiguous region. ``dtype`` is torch's name without the prefix ("float32")."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    model_fingerprint: str
    checksum: str = "xxh3_64"
    order: str = "block_major"
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def itemsize(self) -> int:
        return {"float32": 4, "float16": 2, "bfloat16": 2}[self.dtype]

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_size)

    @property
    def block_bytes(self) -> int:
        num_values = self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_size
        return num_values * self.itemsize


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One life of one block: the generation is new at each allocation."""

    block_id: int
    generation: Generation


@dataclass(frozen=True, slots=True)
class BlockMove:
    """One block to copy: the offer's ``index``-th block into the local block ``target``."""

    index: int
    target: BlockRef


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """The conservation sum of one pool; the null block is outside ``total``."""

    total: int
    free: int
    cached: int
    in_use: int
    leased: int
    importing: int


@dataclass(frozen=True, slots=True)
class Offer:
    """The KV of a sequence's first ``num_tokens`` tokens, held by ``worker_id`` under a lease."""

    lease_id: str
    secret: bytes = field(repr=False)
    worker_id: WorkerId
    epoch: Epoch
    attempt: int
    endpoint: str
    blocks: tuple[BlockRef, ...]
    checksums: tuple[int, ...]
    num_tokens: int
    lease_s: float
    layout: KVLayout


# ---------------------------------------------------------------- what an engine is given


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """A sequence to run. ``output_ids`` are tokens that it has already given (resume, hand-off):
    they count against max_tokens and as output for penalties; the next token sampled has output
    index ``len(output_ids)``.

    ``prefill_only``: stop after one sampled token and leave the prompt's blocks leased under this
    ``seq_id`` (see ``EngineOutput.held``), unless that token ends the request.
    """

    seq_id: SequenceId
    request_id: RequestId
    attempt: int
    prompt_ids: tuple[TokenId, ...]
    output_ids: tuple[TokenId, ...]
    params: SamplingParams
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    arrival_s: float = 0.0
    prefill_only: bool = False
    speculate: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


# ---------------------------------------------------------------- what an engine gives back


@dataclass(frozen=True, slots=True)
class SequenceCounts:
    """What a sequence cost so far in this engine: tokens by where their KV came from, and times.

    ``computed + cached + transferred`` = prompt tokens, for the first run; what is computed again
    after preemption is ``recomputed`` alone, as are output tokens computed again on a resume.
    ``drafted`` tokens were verified beside the sequence's own, ``accepted`` of them were right."""

    computed: int = 0
    cached: int = 0
    transferred: int = 0
    recomputed: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(slots=True)
class SequenceOutput:
    """Tokens that one step gave one sequence. Empty ``token_ids`` only when it finishes without.
    Nobody changes it; it is not frozen because one is made for every token, and a frozen one takes
    several times as long to make. ``num_drafts``: drafted tokens that the step verified for it."""

    seq_id: SequenceId
    index: int
    token_ids: tuple[TokenId, ...]
    counts: SequenceCounts
    num_drafts: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    matched_token_id: TokenId | None = None
    # prefill_only, and the token did not end the request: the blocks of the prompt (and of resumed
    # output), whose references the engine has just turned from the sequence's into a lease's.
    held: tuple[BlockRef, ...] = ()


@dataclass(frozen=True, slots=True)
class ImportReady:
    """Room was made for a handed-off sequence: copy these blocks, then say how it went.

    Blocks of the prompt that this pool already caches are not among them; ``moves`` may be empty.
    """

    seq_id: SequenceId
    moves: tuple[BlockMove, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """The sequence is gone from the engine: its row raised, gave non-finite logits, or can never
    fit. ``reason`` is failed | too_large; ``detail`` is for the log only."""

    seq_id: SequenceId
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """Part of a prompt that one step computed. ``num_logits``: positions whose logits were
    wanted, to sample the first token or to score the prompt's."""

    seq_id: SequenceId
    start: int
    num_tokens: int
    num_logits: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One engine step, for traces and metrics; times are of the engine's monotonic clock.
    ``num_decode_context``: tokens that its decodes attended to, themselves included; drafts are
    counted apart, with ``num_draft_context`` and how many of them were accepted."""

    step_id: int
    start_s: float
    end_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sequences: int
    chunks: tuple[ChunkRecord, ...] = ()
    num_decode_context: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_draft_context: int = 0

    @property
    def num_rows_with_logits(self) -> int:
        """Every decode has logits, and every chunk that ends a prompt."""
        return self.num_decode_tokens + sum(chunk.num_logits > 0 for chunk in self.chunks)


EngineEvent = SequenceOutput | ImportReady | SequenceFailed


# ---------------------------------------------------------------- what a user is told


@dataclass(frozen=True, slots=True)
class Usage:
    """See the message of this name in proto/baton/v1/inference.proto."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    prefill_computed: int = 0
    prefill_cached: int = 0
    decode_cached: int = 0
    decode_transferred: int = 0
    decode_computed: int = 0
    recomputed: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that nobody had to compute: found where the prompt was computed. What a
        decode worker had of a prompt that was handed over saved a copy, not compute."""
        handed_over = self.prefill_computed + self.prefill_cached > 0
        return self.prefill_cached if handed_over else self.decode_cached


@dataclass(frozen=True, slots=True)
class PhasesMs:
    """Milliseconds a request spent in each phase, each measured by one process' own clock."""

    tokenize: float = 0.0
    queue: float = 0.0
    prefill_queue: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    decode_queue: float = 0.0
    decode: float = 0.0
    total: float = 0.0
    time_to_first_token: float = 0.0
