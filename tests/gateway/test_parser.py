"""Numbers of things are judged before the things: what is too many is never looked at."""

import time

import pytest

from common.config import GatewaySettings
from common.errors import InvalidRequest
from common.wire import inference
from gateway.parser import RequestParser
from gateway.tokenizer import IdTokenizer
from tests.gateway.test_books import Clock, make_registry, report

MANY = 2_000_000


def make_parser() -> RequestParser:
    registry, _, _ = make_registry(Clock())
    registry.report(report())
    return RequestParser(GatewaySettings(model="oracle"), registry, IdTokenizer())


def many_messages() -> inference.GenerateRequest:
    """As a client sends them: MANY empty messages of two bytes each."""
    chat = b"\x0a\x00" * MANY
    size = bytes([len(chat) & 0x7F | 0x80, len(chat) >> 7 & 0x7F | 0x80,
                  len(chat) >> 14 & 0x7F | 0x80, len(chat) >> 21])  # fmt: skip
    return inference.GenerateRequest.FromString(b"\x22" + size + chat)


CASES = {
    "prompt": inference.GenerateRequest(token_ids=inference.TokenIds(ids=[9] * MANY)),
    "messages": many_messages(),
    "stop_token_ids": inference.GenerateRequest(
        token_ids=inference.TokenIds(ids=[1]),
        sampling=inference.SamplingParams(stop_token_ids=[9] * MANY),
    ),
}


@pytest.mark.parametrize("field", CASES)
async def test_too_many_are_refused_without_looking_at_them(field: str) -> None:
    parser, message = make_parser(), CASES[field]
    began_s = time.thread_time()
    with pytest.raises(InvalidRequest) as error:
        await parser.parse(message, None)
    assert error.value.field == field
    # Looking at each takes a hundred milliseconds at the very least.
    assert time.thread_time() - began_s < 0.03
