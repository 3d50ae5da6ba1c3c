"""The ticket: what a prefill worker answers for a job."""

from common.bus import MAX_MESSAGE_BYTES
from common.types import SequenceOutput
from common.wire import finish_reason_to_proto, logprobs_to_proto, offer_to_proto
from common.wire import worker as wire
from prefill_worker.job import Job, JobEnd
from worker.identity import WorkerIdentity

# Headers count too.
MAX_TICKET_BYTES = MAX_MESSAGE_BYTES - (16 << 10)


def success_ticket(
    job: Job, worker: WorkerIdentity, output: SequenceOutput
) -> wire.TicketRequest | None:
    """None where it would not fit into one message: prompt_logprobs of a long prompt."""
    counts = output.counts
    # What a resume computes was all computed before; what a preemption repeats is in no sum.
    num_computed = counts.computed + (counts.recomputed if job.spec.output_ids else 0)
    ticket = _empty(job, worker)
    ticket.result.CopyFrom(
        wire.PrefillResult(
            token_ids=output.token_ids,
            logprobs=logprobs_to_proto(output.logprobs),
            prompt_logprobs=logprobs_to_proto(output.prompt_logprobs),
            finish_reason=finish_reason_to_proto(output.finish_reason),
            computed_tokens=num_computed,
            cached_tokens=counts.cached,
            queue_ms=counts.queue_s * 1000,
            prefill_ms=counts.prefill_s * 1000,
            offer=offer_to_proto(job.offer) if job.offer else None,
        )
    )
    return ticket if ticket.ByteSize() <= MAX_TICKET_BYTES else None


def failure_ticket(job: Job, worker: WorkerIdentity, reason: JobEnd) -> wire.TicketRequest:
    ticket = _empty(job, worker)
    ticket.failure.reason = reason.value
    return ticket


def _empty(job: Job, worker: WorkerIdentity) -> wire.TicketRequest:
    return wire.TicketRequest(
        request_id=job.spec.request_id,
        attempt=job.spec.attempt,
        worker_id=worker.worker_id,
        epoch=worker.epoch,
    )
