"""Every conversion there and back, through bytes, with every field away from its default."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from common import wire
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

LAYOUT = KVLayout(2, 16, 3, 64, "bfloat16", "fp", "none", "other", 1, 2)
SAMPLING = SamplingParams(
    max_tokens=9,
    seed=2**64 - 1,
    min_tokens=2,
    temperature=0.5,
    top_p=0.25,
    top_k=40,
    min_p=0.125,
    repetition_penalty=1.5,
    frequency_penalty=-0.5,
    presence_penalty=0.75,
    stop_token_ids=(1, 5),
    logprobs=0,
    prompt_logprobs=3,
    logit_bias=((3, -1.0), (8, 2.5)),
)
OFFER = Offer(
    lease_id="l",
    secret=bytes(range(16)),
    worker_id="p-1",
    epoch=2**63,
    attempt=2,
    endpoint="127.0.0.1:1",
    blocks=(BlockRef(1, 7), BlockRef(2**31, 9)),
    checksums=(2**64 - 1, 0),
    num_tokens=31,
    lease_s=2.5,
    layout=LAYOUT,
)
CASES: list[tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = [
    (SAMPLING, wire.sampling_to_proto, wire.sampling_from_proto),
    (LAYOUT, wire.layout_to_proto, wire.layout_from_proto),
    (OFFER, wire.offer_to_proto, wire.offer_from_proto),
    (BlockCounts(1, 2, 3, 4, 5, 6), wire.block_counts_to_proto, wire.block_counts_from_proto),
    (Usage(*range(1, 12)), wire.usage_to_proto, wire.usage_from_proto),
    (PhasesMs(*(i / 8 for i in range(1, 10))), wire.phases_to_proto, wire.phases_from_proto),
    (
        ModelDescription("m", "fp", 512, 2048, (0, 2)),
        wire.model_to_proto,
        wire.model_from_proto,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case[0]).__name__)
def test_there_and_back(case: tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]) -> None:
    value, to_proto, from_proto = case
    for field in dataclasses.fields(value):
        assert getattr(value, field.name) != field.default, f"{field.name} proves nothing"
    message = to_proto(value)
    again = type(message).FromString(message.SerializeToString())
    assert from_proto(again) == value


def test_absent_logprobs_stay_absent() -> None:
    plain = SamplingParams(max_tokens=1, seed=0)
    assert wire.sampling_from_proto(wire.sampling_to_proto(plain)) == plain


def test_logprobs() -> None:
    positions = (
        TokenLogprobs(3, None, 0),
        TokenLogprobs(4, 0.0, 1, ((4, 0.0), (9, -1.5))),
        TokenLogprobs(0, -2.25, 17),
    )
    assert wire.logprobs_from_proto(wire.logprobs_to_proto(positions)) == positions


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons(reason: FinishReason | None) -> None:
    assert wire.finish_reason_from_proto(wire.finish_reason_to_proto(reason)) is reason


def test_an_unknown_finish_reason_is_refused() -> None:
    value = wire.inference.GenerateResponse.FromString(b"\x1a\x02\x08\x63").complete.finish_reason
    with pytest.raises(InvalidRequest, match="99"):
        wire.finish_reason_from_proto(value)


def test_service_names() -> None:
    assert wire.INFERENCE_SERVICE == "baton.v1.InferenceService"
    assert wire.DECODE_SERVICE == "baton.v1.DecodeService"
    assert wire.KV_TRANSFER_SERVICE == "baton.v1.KVTransferService"
    assert wire.SUPERVISOR_SERVICE == "baton.v1.SupervisorService"
