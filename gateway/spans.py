"""What the span of a user's request says in the words of OpenTelemetry's GenAI conventions.

The names are strings of our own: all are still in development, and the constants of the semantic
conventions package are deprecated since they moved. Where vLLM's traces use an older name for the
same thing both are set, so that what reads its traces reads ours. No prompt, no output and no stop
string is ever an attribute.
"""

from collections.abc import Sequence

from common.telemetry import AttributeValue, Span
from gateway.request import Completed, Request

TEXT_COMPLETION, CHAT = "text_completion", "chat"


def begin_request(
    span: Span, operation: str, model: str, requests: Sequence[Request], stream: bool = True
) -> None:
    """The request as it was understood; ``requests`` are its choices."""
    first = requests[0]
    params = first.params
    attributes: dict[str, AttributeValue] = {
        "baton.request_id": first.request_id,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model,
        "gen_ai.request.id": first.request_id,
        "gen_ai.request.stream": stream,
        "gen_ai.request.choice.count": len(requests),
        "gen_ai.request.n": len(requests),
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.usage.input_tokens": len(first.prompt_ids),
        "gen_ai.usage.prompt_tokens": len(first.prompt_ids),
    }
    if params.top_k:
        attributes["gen_ai.request.top_k"] = params.top_k
    if params.seed < 1 << 63:  # an attribute is a signed number
        attributes["gen_ai.request.seed"] = params.seed
    _set(span, attributes)


def end_request(span: Span, model: str, response_id: str, ends: Sequence[Completed]) -> None:
    """How its choices ended: sums of tokens, and the times of the slowest."""
    if not ends:
        return
    num_output = sum(end.usage.output_tokens for end in ends)
    phases = [end.phases_ms for end in ends]
    first_s = min(phase.time_to_first_token for phase in phases) / 1000
    attributes: dict[str, AttributeValue] = {
        "gen_ai.response.id": response_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": tuple(end.finish_reason.value for end in ends),
        "gen_ai.response.time_to_first_chunk": first_s,
        "gen_ai.usage.output_tokens": num_output,
        "gen_ai.usage.completion_tokens": num_output,
        "gen_ai.usage.cache_read.input_tokens": max(end.usage.cached_tokens for end in ends),
        "gen_ai.latency.time_to_first_token": first_s,
        "gen_ai.latency.e2e": max(phase.total for phase in phases) / 1000,
        "gen_ai.latency.time_in_queue": max(
            phase.queue + phase.prefill_queue + phase.decode_queue for phase in phases
        )
        / 1000,
        "gen_ai.latency.time_in_model_prefill": max(phase.prefill for phase in phases) / 1000,
        "gen_ai.latency.time_in_model_decode": max(phase.decode for phase in phases) / 1000,
        "gen_ai.latency.time_in_model_inference": max(
            phase.prefill + phase.transfer + phase.decode for phase in phases
        )
        / 1000,
    }
    _set(span, attributes)


def _set(span: Span, attributes: dict[str, AttributeValue]) -> None:
    for name, value in attributes.items():
        span.set(name, value)
