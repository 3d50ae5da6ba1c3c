"""What a worker says of itself to the gateways."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from common.config import PROTOCOL_VERSION
from common.types import KVLayout, ModelDescription, RequestId, WorkerId
from common.wire import block_counts_to_proto, layout_to_proto, model_to_proto
from common.wire import worker as wire
from engine.flops import ModelCosts
from engine.statistics import EngineStatistics
from worker.identity import Endpoints, WorkerIdentity


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    # The last report of a worker that leaves.
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What does not change while a worker runs. ``num_blocks``: without the null block.
    ``costs``: of a model that computes nothing, unless told."""

    identity: WorkerIdentity
    endpoints: Endpoints
    model: ModelDescription
    layout: KVLayout
    num_blocks: int
    transports: tuple[str, ...]
    # Tokens that a step of the engine may compute.
    step_tokens: int
    local_prefill: str = ""
    costs: ModelCosts = field(default_factory=ModelCosts)


def make_report(facts: WorkerFacts, state: WorkerState, load: wire.WorkerLoad) -> wire.WorkerReport:
    return wire.WorkerReport(
        worker_id=facts.identity.worker_id,
        role=facts.identity.role.value,
        epoch=facts.identity.epoch,
        protocol_version=PROTOCOL_VERSION,
        model=model_to_proto(facts.model),
        layout=layout_to_proto(facts.layout),
        endpoint=facts.endpoints.grpc,
        admin_endpoint=facts.endpoints.admin,
        pid=os.getpid(),
        transports=facts.transports,
        state=state.value,
        local_prefill=facts.local_prefill,
        load=load,
    )


def make_load(
    engine: EngineStatistics,
    step_age_s: float,
    owned: Iterable[tuple[RequestId, int]],
    bytes_moved: Mapping[str, int],
    kv_events: int,
    free_slots: int = 0,
    promised_blocks: int = 0,
    queued_tokens: int = 0,
    prefill_tokens_per_s: float = 0.0,
    full_step_tokens_per_s: float = 0.0,
    transfer_bytes_per_s: float = 0.0,
    kv_links: Mapping[WorkerId, str] | None = None,
) -> wire.WorkerLoad:
    return wire.WorkerLoad(
        running=engine.num_running,
        waiting=engine.num_waiting,
        free_slots=free_slots,
        blocks=block_counts_to_proto(engine.blocks),
        promised_blocks=promised_blocks,
        owned=[wire.OwnedAttempt(request_id=request, attempt=number) for request, number in owned],
        bytes_moved=bytes_moved,
        step_age_s=step_age_s,
        queued_tokens=queued_tokens,
        prefill_tokens_per_s=prefill_tokens_per_s,
        full_step_tokens_per_s=full_step_tokens_per_s,
        transfer_bytes_per_s=transfer_bytes_per_s,
        kv_events=kv_events,
        kv_links=kv_links,
    )
