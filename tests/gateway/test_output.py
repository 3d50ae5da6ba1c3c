"""What leaves the gateway: merged deltas, stop tokens, clients that stop reading."""

import asyncio

import pytest
from tokenizers import Tokenizer, decoders, models

from common.errors import RequestCancelled
from common.types import FinishReason, SamplingParams, TokenLogprobs
from gateway.detokenizer import Detokenizer
from gateway.output import Output
from gateway.request import Delta, Request
from gateway.run import Arrival

WORDS = ["a", "b", "c", "STOP"]


def make_output(
    include_stop: bool = False, stop: tuple[str, ...] = (), slow_client_s: float = 30.0
) -> Output:
    tokenizer = Tokenizer(models.WordLevel(dict(zip(WORDS, range(4), strict=True)), "a"))
    tokenizer.decoder = decoders.Fuse()
    params = SamplingParams(max_tokens=9, seed=0)
    request = Request("r", "", (1,), params, 10.0, stop=stop, include_stop=include_stop)
    detokenizer = Detokenizer(tokenizer, stop=stop, include_stop_str_in_output=include_stop)
    return Output(request, detokenizer, slow_client_s)


async def taken(output: Output) -> Delta:
    return await anext(aiter(output.deltas()))


async def test_what_waits_is_one_delta() -> None:
    output = make_output()
    assert output.push(Arrival(0, (0, 1), ())) is None
    assert output.push(Arrival(2, (2,), ())) is None
    assert await taken(output) == Delta(0, (0, 1, 2), "abc")


async def test_after_a_pause_no_delta_is_large() -> None:
    """Twenty tokens at once, and one by one, to a client that was away: the same deltas."""
    ids = tuple(index % 3 for index in range(20))
    logprobs = tuple(TokenLogprobs(token_id, -1.0, 1) for token_id in ids)
    at_once, singly = make_output(), make_output()
    finish = at_once.push(Arrival(5, ids, logprobs, (), FinishReason.LENGTH))
    for number, token_id in enumerate(ids):
        reason = FinishReason.LENGTH if number == 19 else None
        singly.push(Arrival(5 + number, (token_id,), logprobs[number : number + 1], (), reason))
    assert finish is not None and finish.num_tokens == 20
    for output in (at_once, singly):
        output.close()
    deltas = [delta async for delta in at_once.deltas()]
    assert deltas == [delta async for delta in singly.deltas()]
    assert [(delta.index, len(delta.token_ids)) for delta in deltas] == [(5, 8), (13, 8), (21, 4)]
    assert "".join(delta.text for delta in deltas) == "".join(WORDS[token] for token in ids)
    assert sum((delta.logprobs for delta in deltas), ()) == logprobs


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abSTOP")])
async def test_the_text_of_a_stop_token_shows_only_when_asked_for(include: bool, text: str) -> None:
    output = make_output(include_stop=include)
    finish = output.push(Arrival(0, (0, 1, 3), (), (), FinishReason.STOP, matched_token_id=3))
    assert finish is not None
    assert (finish.reason, finish.num_tokens, finish.matched_token_id) == (FinishReason.STOP, 3, 3)
    assert await taken(output) == Delta(0, (0, 1, 3), text, last=True)


async def test_tokens_behind_a_stop_string_are_not_output() -> None:
    output = make_output(stop=("b",))
    finish = output.push(Arrival(0, (0, 1, 2), (), (), FinishReason.LENGTH))
    assert finish is not None
    assert (finish.reason, finish.num_tokens, finish.matched_string) == (FinishReason.STOP, 2, "b")
    assert await taken(output) == Delta(0, (0, 1), "a", last=True)


@pytest.mark.fault("F30")
async def test_a_client_that_stops_reading_ends_the_request() -> None:
    output = make_output(slow_client_s=0.05)
    output.push(Arrival(0, (0,), ()))
    await asyncio.sleep(0.1)
    with pytest.raises(RequestCancelled):
        output.push(Arrival(1, (1,), ()))


async def test_an_answer_that_nobody_takes_ends_too() -> None:
    output = make_output(slow_client_s=0.05)
    output.push(Arrival(0, (0,), (), (), FinishReason.LENGTH))
    with pytest.raises(RequestCancelled):
        await output.drained()
