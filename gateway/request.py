"""What a client asked, parsed once into types that cannot be wrong, and what it is told."""

from dataclasses import dataclass

from common.types import FinishReason, PhasesMs, SamplingParams, TokenId, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class Request:
    """One choice of one user request: a prompt, how to sample, and until when.

    ``request_id`` is ours and unique; ``client_request_id`` is the client's own and only echoed.
    ``params.seed`` is always set, ``params.stop_token_ids`` holds the model's eos ids too.
    """

    request_id: str
    client_request_id: str
    prompt_ids: tuple[TokenId, ...]
    params: SamplingParams
    timeout_s: float
    choice: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    speculate: bool = True
    tokenize_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens and text that came since the last delta of this choice. ``index`` is the output index
    of the first id; ``logprobs`` has one entry a token when asked for. Behind the ``last`` one
    only the end comes, at once."""

    index: int
    token_ids: tuple[TokenId, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    last: bool = False

    def __add__(self, later: "Delta") -> "Delta":
        """One delta in place of two that follow each other."""
        return Delta(
            self.index,
            self.token_ids + later.token_ids,
            self.text + later.text,
            self.logprobs + later.logprobs,
            self.prompt_logprobs or later.prompt_logprobs,
            later.last,
        )


@dataclass(frozen=True, slots=True)
class Completed:
    """The one end of a choice that was answered."""

    finish_reason: FinishReason
    usage: Usage
    phases_ms: PhasesMs
    attempts: int
    seed: int
    matched_token_id: TokenId | None = None
    matched_string: str | None = None


OutputEvent = Delta | Completed
