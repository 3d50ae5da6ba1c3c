"""What all choices of one request may take together."""

import re

import pytest

from common.errors import InvalidRequest
from common.types import SamplingParams
from gateway.request import Request
from gateway.serving import MAX_PROMPT_LOGPROBS, check_size


def choices(num: int, num_tokens: int, prompt_logprobs: int | None = None) -> list[Request]:
    params = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=prompt_logprobs)
    return [Request(f"r{i}", "", (1,) * num_tokens, params, 10.0) for i in range(num)]


def test_what_no_queue_will_ever_take_is_no_reason_to_come_back_later() -> None:
    check_size(choices(4, 25), max_tokens=100)
    with pytest.raises(InvalidRequest, match=re.escape("prompt: 104 tokens")):
        check_size(choices(4, 26), max_tokens=100)
    check_size(choices(1, 200), max_tokens=100)  # admission's own word for a single one


def test_prompt_logprobs_of_all_choices_are_bounded() -> None:
    check_size(choices(2, MAX_PROMPT_LOGPROBS // 4, prompt_logprobs=1), 1 << 30)
    with pytest.raises(InvalidRequest, match="prompt_logprobs: "):
        check_size(choices(16, 2000, prompt_logprobs=20), 1 << 30)
    check_size(choices(16, 20_000), 1 << 30)
