"""The generated messages under short names, and their conversions to and from common/types.py.

Only this package may import ``baton.v1``; everyone else takes ``inference``, ``worker`` and
``supervisor`` (messages) and the ``*_grpc`` modules (stubs, servicers) from here. A conversion
named ``x_from_proto`` raises InvalidRequest where a peer sent a value that this version lacks.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from baton.v1 import inference_pb2 as inference
from baton.v1 import inference_pb2_grpc as inference_grpc
from baton.v1 import supervisor_pb2 as supervisor
from baton.v1 import supervisor_pb2_grpc as supervisor_grpc
from baton.v1 import worker_pb2 as worker
from baton.v1 import worker_pb2_grpc as worker_grpc
from common.errors import InvalidRequest
from common.types import (
    BlockCounts,
    BlockRef,
    FinishReason,
    KVLayout,
    ModelDescription,
    Offer,
    PhasesMs,
    SamplingParams,
    TokenLogprobs,
    Usage,
)

__all__ = [
    "DECODE_SERVICE",
    "INFERENCE_SERVICE",
    "KV_TRANSFER_SERVICE",
    "SUPERVISOR_SERVICE",
    "block_counts_from_proto",
    "block_counts_to_proto",
    "finish_reason_from_proto",
    "finish_reason_to_proto",
    "inference",
    "inference_grpc",
    "layout_from_proto",
    "layout_to_proto",
    "logprobs_from_proto",
    "logprobs_to_proto",
    "model_from_proto",
    "model_to_proto",
    "offer_from_proto",
    "offer_to_proto",
    "phases_from_proto",
    "phases_to_proto",
    "sampling_from_proto",
    "sampling_to_proto",
    "supervisor",
    "supervisor_grpc",
    "usage_from_proto",
    "usage_to_proto",
    "worker",
    "worker_grpc",
]

# Full names, for health checks and reflection.
INFERENCE_SERVICE = inference.DESCRIPTOR.services_by_name["InferenceService"].full_name
DECODE_SERVICE = worker.DESCRIPTOR.services_by_name["DecodeService"].full_name
KV_TRANSFER_SERVICE = worker.DESCRIPTOR.services_by_name["KVTransferService"].full_name
SUPERVISOR_SERVICE = supervisor.DESCRIPTOR.services_by_name["SupervisorService"].full_name


def _fields(record: Usage | PhasesMs | ModelDescription | KVLayout | BlockCounts) -> dict[str, Any]:
    """By name. Not `asdict`, which copies deeply: these are part of every report."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


# ---------------------------------------------------------------- sampling and its results


def sampling_to_proto(params: SamplingParams) -> worker.ResolvedSampling:
    return worker.ResolvedSampling(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        stop_token_ids=params.stop_token_ids,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        logit_bias=dict(params.logit_bias),
        seed=params.seed,
    )


def sampling_from_proto(message: worker.ResolvedSampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        seed=message.seed,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        stop_token_ids=tuple(message.stop_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        logit_bias=tuple(sorted(message.logit_bias.items())),
    )


def logprobs_to_proto(positions: Iterable[TokenLogprobs]) -> list[inference.TokenLogprobs]:
    return [
        inference.TokenLogprobs(
            token_id=position.token_id,
            logprob=position.logprob,
            rank=position.rank,
            top=[inference.TopLogprob(token_id=i, logprob=value) for i, value in position.top],
        )
        for position in positions
    ]


def logprobs_from_proto(
    messages: Iterable[inference.TokenLogprobs],
) -> tuple[TokenLogprobs, ...]:
    return tuple(
        [
            TokenLogprobs(
                token_id=message.token_id,
                logprob=message.logprob if message.HasField("logprob") else None,
                rank=message.rank,
                top=tuple((entry.token_id, entry.logprob) for entry in message.top),
            )
            for message in messages
        ]
    )


_FINISH_TO_PROTO = {
    None: inference.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference.FINISH_REASON_ABORT,
    FinishReason.ERROR: inference.FINISH_REASON_ERROR,
}
_FINISH_FROM_PROTO = {value: reason for reason, value in _FINISH_TO_PROTO.items()}


def finish_reason_to_proto(reason: FinishReason | None) -> inference.FinishReason:
    return _FINISH_TO_PROTO[reason]


def finish_reason_from_proto(value: inference.FinishReason) -> FinishReason | None:
    """None: not finished."""
    if value not in _FINISH_FROM_PROTO:
        raise InvalidRequest("finish_reason", f"{int(value)} is not a known reason")
    return _FINISH_FROM_PROTO[value]


# ---------------------------------------------------------------- what a user is told


def usage_to_proto(usage: Usage) -> inference.Usage:
    return inference.Usage(**_fields(usage))


def usage_from_proto(message: inference.Usage) -> Usage:
    return Usage(**{name: getattr(message, name) for name in Usage.__dataclass_fields__})


def phases_to_proto(phases: PhasesMs) -> inference.PhasesMs:
    return inference.PhasesMs(**_fields(phases))


def phases_from_proto(message: inference.PhasesMs) -> PhasesMs:
    return PhasesMs(**{name: getattr(message, name) for name in PhasesMs.__dataclass_fields__})


def block_counts_to_proto(counts: BlockCounts) -> inference.BlockCounts:
    return inference.BlockCounts(
        **{name: getattr(counts, name) for name in BlockCounts.__dataclass_fields__}
    )


def block_counts_from_proto(message: inference.BlockCounts) -> BlockCounts:
    return BlockCounts(
        **{name: getattr(message, name) for name in BlockCounts.__dataclass_fields__}
    )


# ---------------------------------------------------------------- model, layout, offer


def model_to_proto(model: ModelDescription) -> worker.ModelDescription:
    return worker.ModelDescription(**_fields(model))


def model_from_proto(message: worker.ModelDescription) -> ModelDescription:
    return ModelDescription(
        name=message.name,
        fingerprint=message.fingerprint,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
    )


def layout_to_proto(layout: KVLayout) -> worker.KVLayout:
    return worker.KVLayout(**_fields(layout))


def layout_from_proto(message: worker.KVLayout) -> KVLayout:
    return KVLayout(**{name: getattr(message, name) for name in KVLayout.__dataclass_fields__})


def _blocks_to_proto(blocks: Sequence[BlockRef]) -> list[worker.BlockRef]:
    return [worker.BlockRef(block_id=b.block_id, generation=b.generation) for b in blocks]


def offer_to_proto(offer: Offer) -> worker.Offer:
    return worker.Offer(
        lease_id=offer.lease_id,
        secret=offer.secret,
        worker_id=offer.worker_id,
        epoch=offer.epoch,
        attempt=offer.attempt,
        endpoint=offer.endpoint,
        blocks=_blocks_to_proto(offer.blocks),
        checksums=offer.checksums,
        num_tokens=offer.num_tokens,
        lease_ms=round(offer.lease_s * 1000),
        layout=layout_to_proto(offer.layout),
    )


def offer_from_proto(message: worker.Offer) -> Offer:
    return Offer(
        lease_id=message.lease_id,
        secret=message.secret,
        worker_id=message.worker_id,
        epoch=message.epoch,
        attempt=message.attempt,
        endpoint=message.endpoint,
        blocks=tuple(BlockRef(b.block_id, b.generation) for b in message.blocks),
        checksums=tuple(message.checksums),
        num_tokens=message.num_tokens,
        lease_s=message.lease_ms / 1000,
        layout=layout_from_proto(message.layout),
    )
