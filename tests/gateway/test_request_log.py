"""The line that a request leaves in the log, however it ends."""

import asyncio
import logging

import pytest

from common.errors import InvalidRequest
from gateway.request_log import recorded


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidRequest("prompt", "the secret is 42"), "InvalidRequest"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
        (KeyError("the secret is 42"), "InternalError"),
    ],
)
async def test_how_a_request_ended_without_an_answer(
    error: BaseException, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(type(error)),
        recorded("t1") as record,
    ):
        record.request_id, record.num_prompt_tokens = "r1", 7
        raise error
    (line,) = caplog.records
    assert line.getMessage().startswith("request: 7 + 0 tokens, ")
    assert line.getMessage().endswith(f" ms, {outcome}")
    assert "secret" not in line.getMessage()
    assert vars(line)["request_id"] == "r1" and vars(line)["trace_id"] == "t1"
