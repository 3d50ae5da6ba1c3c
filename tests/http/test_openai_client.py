"""The official `openai` package against a running Baton, as its users use it."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from openai import (
    APIError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    OpenAI,
)
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.cluster import Cluster, baton_up

MODEL = "SmolLM2-135M-Instruct"
TEXT = "The capital of France is"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: Any = {"model": MODEL, "temperature": 0.0}


@pytest.fixture
def client(smollm2: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://{smollm2.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def validated(answer: Any) -> Any:
    """The package builds its objects without looking; here they are looked at. Its types lack two
    nulls that OpenAI sends: no reason before the end, no logprob of a prompt's first token."""
    content = answer.to_dict()
    if isinstance(answer, Completion):
        for choice in content["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            if choice["logprobs"] is not None and choice["logprobs"]["token_logprobs"][0] is None:
                choice["logprobs"]["token_logprobs"][0] = 0.0
                choice["logprobs"]["top_logprobs"][0] = {}
    type(answer).model_validate(content, strict=True)
    return answer


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL == client.models.retrieve(MODEL).id
    assert model.to_dict()["root"] == MODEL
    assert model.to_dict()["max_model_len"] == 8192


def test_completion(client: OpenAI) -> None:
    answer = validated(client.completions.create(prompt=TEXT, max_tokens=8, **GREEDY))
    (choice,) = answer.choices
    assert choice.text.startswith(" Paris") and choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8)
    assert answer.id.startswith("cmpl-") and answer.model == MODEL
    default = client.completions.create(prompt=TEXT, extra_body={"ignore_eos": True}, **GREEDY)
    assert default.usage is not None and default.usage.completion_tokens == 16


def test_prompts_of_all_kinds(client: OpenAI) -> None:
    ids = [504, 3575, 282, 4649, 314]
    prompts: list[Any] = [TEXT, [TEXT, TEXT], ids, [ids, ids]]
    texts = set()
    for prompt in prompts:
        answer = validated(client.completions.create(prompt=prompt, max_tokens=4, **GREEDY))
        num = 1 if prompt in (TEXT, ids) else 2
        assert [choice.index for choice in answer.choices] == list(range(num))
        assert answer.usage.prompt_tokens == 5 * num
        texts |= {choice.text for choice in answer.choices}
    assert len(texts) == 1


def test_streamed_completion(client: OpenAI) -> None:
    whole = client.completions.create(prompt=TEXT, max_tokens=8, **GREEDY)
    chunks = [
        validated(chunk)
        for chunk in client.completions.create(
            prompt=TEXT,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    ]
    *texts, last = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in texts] == [None] * (len(texts) - 1) + ["length"]
    assert not last.choices and last.usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in texts)
    assert last.to_dict()["metrics"]["time_to_first_token_ms"] > 0


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(messages=QUESTION, max_completion_tokens=12, **GREEDY)
    assert isinstance(validated(answer), ChatCompletion)
    message = answer.choices[0].message
    assert message.role == "assistant" and message.content and "Paris" in message.content
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    again = client.chat.completions.create(messages=parts, max_tokens=12, **GREEDY)
    assert again.choices[0].message.content == message.content
    talk: Any = [*QUESTION, message.to_dict(), {"role": "user", "content": "And of Spain?"}]
    more = validated(client.chat.completions.create(messages=talk, max_tokens=4, **GREEDY))
    assert more.usage.prompt_tokens > answer.usage.prompt_tokens  # type: ignore[union-attr]


def test_streamed_chat(client: OpenAI) -> None:
    whole = client.chat.completions.create(messages=QUESTION, max_tokens=8, **GREEDY)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.chat.completions.create(
        messages=QUESTION, max_tokens=8, stream=True, stream_options=options, **GREEDY
    )
    role, *texts, last = [validated(chunk) for chunk in stream]
    assert isinstance(role, ChatCompletionChunk)
    assert (role.choices[0].delta.role, role.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in texts)
    text = "".join(chunk.choices[0].delta.content for chunk in texts)
    assert text == whole.choices[0].message.content
    counts = [chunk.usage.completion_tokens for chunk in texts]
    assert counts == sorted(counts) and counts[-1] == 8 == last.usage.completion_tokens
    assert not last.choices


def test_the_stream_helper(client: OpenAI) -> None:
    with client.chat.completions.stream(messages=QUESTION, max_tokens=16, **GREEDY) as stream:
        answer = stream.get_final_completion()
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "The capital of France is Paris."


def test_logprobs(client: OpenAI) -> None:
    answer = validated(
        client.completions.create(prompt=TEXT, max_tokens=3, logprobs=2, echo=True, **GREEDY)
    )
    found = answer.choices[0].logprobs
    assert "".join(found.tokens) == answer.choices[0].text
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 5 + 3
    assert found.token_logprobs[0] is None and all(v <= 0 for v in found.token_logprobs[1:])
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert answer.choices[0].text[offset:].startswith(token)
    for value, top in zip(found.token_logprobs[5:], found.top_logprobs[5:], strict=True):
        assert len(top) == 2 and max(top.values()) == value
    chat = validated(
        client.chat.completions.create(
            messages=QUESTION, max_tokens=3, logprobs=True, top_logprobs=3, **GREEDY
        )
    )
    content = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == chat.choices[0].message.content
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in content)


def test_echo_scores_a_prompt_without_an_answer(client: OpenAI) -> None:
    """What evaluation harnesses ask for, again and again: nothing of it may come from a cache."""
    for _ in range(2):
        answer = client.completions.create(
            prompt=TEXT, max_tokens=0, logprobs=1, echo=True, **GREEDY
        )
        (choice,) = answer.choices
        assert choice.text == TEXT and choice.logprobs is not None
        assert choice.logprobs.tokens is not None and len(choice.logprobs.tokens) == 5
    scored = client.completions.create(
        prompt=TEXT, max_tokens=1, extra_body={"prompt_logprobs": 1}, **GREEDY
    )
    positions = scored.choices[0].to_dict()["prompt_logprobs"]
    assert isinstance(positions, list) and positions[0] is None and len(positions) == 5


def test_choices_seeds_and_stops(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": TEXT, "max_tokens": 6, "temperature": 1.0}
    first = validated(client.completions.create(n=3, seed=11, **asked))
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) > 1
    for i, text in enumerate(texts):
        assert client.completions.create(seed=11 + i, **asked).choices[0].text == text
    stopped = client.completions.create(prompt=TEXT, max_tokens=8, stop=[".", "\n"], **GREEDY)
    assert stopped.choices[0].text == " Paris" and stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].to_dict()["stop_reason"] == "."


@pytest.mark.fault("V10")
def test_a_special_token_in_a_message_stays_text(client: OpenAI) -> None:
    body: Any = {"model": MODEL, "messages": [{"role": "user", "content": "a<|im_end|>b"}]}
    raw = httpx2.post(str(client.base_url).replace("/v1/", "/tokenize"), json=body, trust_env=False)
    tokens = raw.json()["tokens"]
    plain: Any = {"model": MODEL, "messages": [{"role": "user", "content": "ab"}]}
    raw = httpx2.post(
        str(client.base_url).replace("/v1/", "/tokenize"), json=plain, trust_env=False
    )
    end_of_turn = raw.json()["tokens"][-4:]
    assert tokens.count(2) == raw.json()["tokens"].count(2), end_of_turn
    assert len(tokens) > len(raw.json()["tokens"]) + 2


def test_request_ids_and_traces(client: OpenAI) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"x-request-id": "mine-7", "traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    raw = client.completions.with_raw_response.create(
        prompt=TEXT, max_tokens=1, extra_headers=headers, **GREEDY
    )
    assert raw.headers["x-request-id"] == "mine-7"
    assert raw.headers["baton-trace-id"] == trace_id
    assert raw.parse().id == "cmpl-mine-7"


def test_errors(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt=TEXT, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "BadRequestError"
    with pytest.raises(BadRequestError) as bad:
        client.chat.completions.create(
            messages=QUESTION, stream=True, max_completion_tokens=1 << 20, **GREEDY
        )
    assert bad.value.param == "max_completion_tokens"
    with pytest.raises(NotFoundError):
        client.completions.create(model="gpt-4", prompt=TEXT)
    assert not issubclass(AuthenticationError, BadRequestError)


async def test_many_at_once(smollm2: Cluster) -> None:
    async with AsyncOpenAI(base_url=f"http://{smollm2.http}/v1", api_key="none") as client:

        async def ask(index: int) -> str:
            text = ""
            stream = await client.completions.create(
                prompt=f"{index} and {TEXT}", max_tokens=6, stream=True, **GREEDY
            )
            async for chunk in stream:
                validated(chunk)
                text += chunk.choices[0].text
            return text

        streamed = await asyncio.gather(*map(ask, range(8)))
        whole = await asyncio.gather(
            *(
                client.completions.create(prompt=f"{i} and {TEXT}", max_tokens=6, **GREEDY)
                for i in range(8)
            )
        )
        assert streamed == [answer.choices[0].text for answer in whole]
        # Leaving early is nothing but closing the stream.
        stream = await client.completions.create(
            prompt=TEXT, max_tokens=500, stream=True, extra_body={"ignore_eos": True}, **GREEDY
        )
        await anext(aiter(stream))
        await stream.close()
    await smollm2.until_clean()


@pytest.mark.full
async def test_retries_until_there_is_a_worker(tmp_path: Any) -> None:
    """503 says when to come back, and the package comes back by itself. After the first byte an
    error is an event, which the package raises."""
    flags = ["--num-blocks", "64", "--step-delay-ms", "20", "--max-attempts", "1"]
    async with baton_up(tmp_path, flags=flags) as cluster:
        (decode,) = cluster.of_role("decode")
        async with AsyncOpenAI(base_url=f"http://{cluster.http}/v1", api_key="none") as client:
            stream = await client.completions.create(
                model="oracle", prompt=[1, 2, 3], max_tokens=500, stream=True
            )
            chunks = aiter(stream)
            await anext(chunks)
            decode.kill()
            with pytest.raises(APIError, match="given up after 1 failures"):
                async for _ in chunks:
                    pass
            once = client.with_options(max_retries=0)
            with pytest.raises(InternalServerError) as unavailable:
                await once.completions.create(model="oracle", prompt=[1, 2, 3], max_tokens=2)
            assert unavailable.value.status_code == 503
            assert float(unavailable.value.response.headers["retry-after"]) >= 1
            again = client.with_options(max_retries=30)
            answer = await again.completions.create(model="oracle", prompt=[1, 2], max_tokens=2)
            assert answer.choices[0].finish_reason == "length"
        await cluster.until_clean()
