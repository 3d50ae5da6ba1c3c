"""One job on its way through a prefill worker."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from google.protobuf.message import DecodeError

from common.telemetry import Carrier, carrier_from
from common.types import Offer, RequestId, SequenceId, SequenceOutput, SequenceSpec
from common.wire import worker as wire
from worker.sequences import spec_from_state


class JobEnd(StrEnum):
    """Why a job ends without a result; all but ``CANCELLED`` are told to the gateway."""

    CANCELLED = "cancelled"
    FAILED = "failed"
    TOO_LARGE = "too_large"
    MESSAGE_TOO_LARGE = "message_too_large"
    DRAINED = "drained"
    DEADLINE = "deadline"


Outcome = SequenceOutput | JobEnd


@dataclass(slots=True, eq=False)
class Job:
    """``outcome`` is set once, by whatever ends the job first: the engine, a cancel, a drain."""

    gateway_id: str
    carrier: Carrier
    spec: SequenceSpec
    arrived_s: float
    outcome: asyncio.Future[Outcome] = field(repr=False)
    cancelled: bool = False
    offer: Offer | None = None

    @property
    def key(self) -> tuple[RequestId, int]:
        return (self.spec.request_id, self.spec.attempt)

    def end(self, outcome: Outcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)


def parse_job(data: bytes, headers: Mapping[str, str], seq_id: SequenceId) -> Job | None:
    """None where the bytes are no job."""
    loop = asyncio.get_running_loop()
    try:
        message = wire.PrefillJob.FromString(data)
    except DecodeError:
        return None
    spec = spec_from_state(message.sequence, seq_id, loop.time(), prefill_only=True)
    if not (message.gateway_id and spec.request_id and spec.prompt_ids):
        return None
    return Job(
        gateway_id=message.gateway_id,
        carrier=carrier_from(headers) or carrier_from(message.sequence.trace_context),
        spec=spec,
        arrived_s=spec.arrival_s,
        outcome=loop.create_future(),
    )
