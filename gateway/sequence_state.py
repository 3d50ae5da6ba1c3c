"""A run as workers are told of it."""

from common.wire import inference, sampling_to_proto
from common.wire import worker as wire
from gateway.attempt import Attempt
from gateway.run import Run


def sequence_state(run: Run, attempt: Attempt, now_s: float) -> wire.SequenceState:
    """Prompt and output apart; the deadline as remaining milliseconds (I7)."""
    request = run.request
    return wire.SequenceState(
        request_id=run.request_id,
        attempt=attempt.number,
        prompt_ids=request.prompt_ids,
        output_ids=run.output_ids,
        sampling=sampling_to_proto(request.params),
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        # Among tenants the gateway's queue decides; at a worker none may pass another.
        priority=0 if request.tenant else request.priority,
        remaining_ms=run.remaining_ms(now_s),
        speculation=(
            inference.SPECULATION_UNSPECIFIED if request.speculate else inference.SPECULATION_OFF
        ),
        trace_context=attempt.trace_context,
    )
