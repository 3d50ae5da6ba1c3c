"""Every field of a client's sampling parameters, at and beyond its limits."""

import math

import pytest

from common.errors import InvalidRequest
from common.wire import inference
from gateway.model_facts import ModelFacts
from gateway.sampling import sampling_params, stop_strings

FACTS = ModelFacts(
    "m",
    "f",
    1000,
    128,
    (2,),
    {"temperature": 0.5},
    smallest_pool_tokens=96,
    largest_pool_tokens=112,
)
NAN, INF = math.nan, math.inf
HUGE = 3e38


def parse(num_prompt: int = 10, **fields: object):  # type: ignore[no-untyped-def]
    return sampling_params(inference.SamplingParams(**fields), FACTS, num_prompt, 20)


BAD = [
    *(("temperature", value) for value in (NAN, INF, -INF, -1.0, HUGE, -1e-30)),
    *(("top_p", value) for value in (NAN, INF, -INF, 0.0, -0.5, 1.5)),
    *(("min_p", value) for value in (NAN, INF, -0.1, 1.1)),
    *(("repetition_penalty", value) for value in (NAN, INF, 0.0, -1.0, HUGE, 1e-45, 1e-38, 0.0156)),
    *(("frequency_penalty", value) for value in (NAN, INF, -INF, 2.5, -2.5)),
    *(("presence_penalty", value) for value in (NAN, INF, -INF, 2.5, -2.5)),
    *(("top_k", value) for value in (-2, -(2**31))),
    *(("max_tokens", value) for value in (0, 119, 103, 2**31 - 1, 2**32 - 1)),
    *(("min_tokens", value) for value in (87, 2**32 - 1)),
    *(("logprobs", value) for value in (21, 2**31 - 1)),
    *(("prompt_logprobs", value) for value in (21, 2**31 - 1)),
    *(("stop_token_ids", value) for value in ([1000], [2**31 - 1], list(range(129)))),
    *(
        ("logit_bias", value)
        for value in ({1000: 1.0}, {1: NAN}, {1: INF}, {1: 101.0}, {i: 0.0 for i in range(1025)})
    ),
]


@pytest.mark.parametrize(("field", "value"), BAD)
@pytest.mark.fault("V6", "V7")
def test_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse(**{field: value})
    assert error.value.field == field


GOOD = [
    ("temperature", 0.0, 0.0),
    ("temperature", -0.0, 0.0),
    ("temperature", 1e-30, 0.01),
    ("temperature", 2.0, 2.0),
    ("top_p", 1.0, 1.0),
    ("min_p", 0.0, 0.0),
    ("repetition_penalty", 1 / 64, 1 / 64),
    ("top_k", -1, 0),
    ("top_k", 0, 0),
    ("top_k", 5000, 1000),
    ("max_tokens", 102, 102),
    ("logprobs", 0, 0),
    ("logprobs", 20, 20),
    ("seed", 0, 0),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("frequency_penalty", -2.0, -2.0),
]


@pytest.mark.parametrize(("field", "value", "parsed"), GOOD)
def test_limits_themselves_are_taken(field: str, value: object, parsed: object) -> None:
    result = getattr(parse(**{field: value}), field)
    assert result == pytest.approx(parsed)
    assert math.copysign(1, result) == 1 or result < 0


def test_defaults_come_from_the_model_and_the_smallest_pool() -> None:
    params = parse()
    assert params.temperature == 0.5
    assert params.max_tokens == 96 - 10
    assert params.stop_token_ids == (2,)
    assert parse(ignore_eos=True, stop_token_ids=[7]).stop_token_ids == (7,)
    assert parse().seed != parse().seed


def test_no_token_only_when_the_prompt_is_scored() -> None:
    assert parse(max_tokens=0, prompt_logprobs=1).max_tokens == 0


def test_a_prompt_that_fills_the_model_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        parse(num_prompt=129)
    with pytest.raises(InvalidRequest, match="no room"):
        parse(num_prompt=128)


@pytest.mark.parametrize("stop", [[""], ["x" * 1025], ["x"] * 17])
def test_stop_strings_are_bounded(stop: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        stop_strings(inference.SamplingParams(stop=stop))
