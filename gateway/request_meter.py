"""Requests in numbers: what the gateway alone can know of them. Sums since the start.

`emitted` is called once a message to a client, not once a token; the rest once a request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.histogram import LATENCY_S, TOKEN_S, TOKENS, TTFT_S, WAIT_S, Histogram
from gateway.request import Completed
from gateway.run import Run


def _of(bounds: Sequence[float]) -> Callable[[], Histogram]:
    return lambda: Histogram(bounds)


@dataclass(slots=True)
class RequestMeter:
    """``ended`` counts choices by finish reason, the vLLM way: ``abort`` where the client left,
    ``error`` where it was told of one. A time is of the gateway's clock or of one worker's."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_recomputed_tokens: int = 0
    ended: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0)
    )
    time_to_first_token: Histogram = field(default_factory=_of(TTFT_S))
    inter_token: Histogram = field(default_factory=_of(TOKEN_S))
    time_per_output_token: Histogram = field(default_factory=_of(TOKEN_S))
    e2e: Histogram = field(default_factory=_of(LATENCY_S))
    queue: Histogram = field(default_factory=_of(LATENCY_S))
    prefill: Histogram = field(default_factory=_of(LATENCY_S))
    decode: Histogram = field(default_factory=_of(LATENCY_S))
    inference: Histogram = field(default_factory=_of(LATENCY_S))
    prompt_tokens: Histogram = field(default_factory=_of(TOKENS))
    output_tokens: Histogram = field(default_factory=_of(TOKENS))
    max_tokens: Histogram = field(default_factory=_of(TOKENS))
    transfer: Histogram = field(default_factory=_of(WAIT_S))
    prefill_wait: Histogram = field(default_factory=_of(WAIT_S))
    decode_wait: Histogram = field(default_factory=_of(WAIT_S))

    def emitted(self, run: Run, num_tokens: int, now_s: float) -> None:
        """Tokens are on their way to the client. Those of one message came evenly since the last:
        a step's end is not told, and the client sees no more either."""
        if num_tokens == 0:
            return
        self.num_output_tokens += num_tokens
        if run.last_token_s is None:
            self.num_prompt_tokens += len(run.request.prompt_ids)
            waited_s = now_s - run.started_s + run.request.tokenize_ms / 1000
            self.time_to_first_token.observe(waited_s)
        else:
            self.inter_token.observe((now_s - run.last_token_s) / num_tokens, num_tokens)
        run.last_token_s = now_s

    def completed(self, run: Run, end: Completed) -> None:
        usage, phases = end.usage, end.phases_ms
        self.ended[end.finish_reason.value] += 1
        self.num_cached_tokens += usage.cached_tokens
        self.num_recomputed_tokens += usage.recomputed
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.output_tokens.observe(usage.output_tokens)
        self.max_tokens.observe(run.request.params.max_tokens)
        self.e2e.observe(phases.total / 1000)
        self.queue.observe((phases.queue + phases.prefill_queue + phases.decode_queue) / 1000)
        self.prefill.observe(phases.prefill / 1000)
        self.decode.observe(phases.decode / 1000)
        self.inference.observe((phases.prefill + phases.transfer + phases.decode) / 1000)
        self.transfer.observe(phases.transfer / 1000)
        self.prefill_wait.observe((phases.queue + phases.prefill_queue) / 1000)
        self.decode_wait.observe(phases.decode_queue / 1000)
        if usage.output_tokens > 1:
            after_first_ms = phases.total - phases.time_to_first_token
            self.time_per_output_token.observe(after_first_ms / 1000 / (usage.output_tokens - 1))
