"""What cannot be served is refused in OpenAI's shape, by field, and harms no running stream."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psutil
import pytest
from support.cluster import Cluster
from support.engines import VOCAB_SIZE
from support.openai_http import CHAT, COMPLETIONS, http_client

from common.types import SamplingParams
from engine.oracle import reference_ids

MAX_BODY_BYTES = 1 << 20
READ_TIMEOUT_S = 1.0
# Nothing here computes; what is slow here is the machine.
FAST_S = 3.0
MAX_GROWTH_BYTES = 48 << 20
# 150 MiB are sent at once: 32 MiB of bodies, and what each connection and the allocator keep.
MAX_GROWTH_OF_MANY_BYTES = 124 << 20
INTERNAL = re.compile(
    r"/\w+/|\d+\.\d+\.\d+\.\d+|localhost|:\d{4,5}\b|\bpid\b"
    r"|Traceback|File \"|pydantic|\.py\b|0x[0-9a-f]"
)
PROMPT = [1, 2, 3]
MESSAGES = [{"role": "user", "content": "hello"}]


def assert_error(status: int, data: bytes, wanted_status: int, param: str | None) -> str:
    """OpenAI's shape, the right field, and nothing internal. Returns the text."""
    error = json.loads(data)["error"]
    assert status == wanted_status == error["code"], error
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["type"].endswith("Error")
    assert not INTERNAL.search(error["message"]), error
    return str(error["message"])


@asynccontextmanager
async def nobody_notices(
    cluster: Cluster, max_growth_bytes: int = MAX_GROWTH_BYTES
) -> AsyncIterator[None]:
    """Around refusals: a stream that began before them goes on, right, until after them; the
    gateway is the same process and not much larger; nothing stays held."""
    (gateway,) = cluster.of_role("gateway")
    before = psutil.Process(gateway.pid).memory_info().rss
    prompt, num_tokens = [7, 8, 9], 900
    body = {
        "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    ids: list[int] = []
    async with (
        http_client(cluster.http) as client,
        client.stream("POST", COMPLETIONS, json=body) as response,
    ):
        lines = response.aiter_lines()

        async def read(num: int) -> None:
            async with asyncio.timeout(FAST_S):
                while len(ids) < num:
                    line = await anext(lines)
                    if line.startswith("data: {"):
                        ids.extend(json.loads(line[6:])["choices"][0]["token_ids"])

        await read(2)
        yield
        await read(len(ids) + 2)
    params = SamplingParams(max_tokens=len(ids), seed=0, temperature=0.0)
    assert ids == reference_ids(prompt, params, VOCAB_SIZE)
    await cluster.until_clean()
    assert psutil.Process(gateway.pid).memory_info().rss - before < max_growth_bytes


# ---------------------------------------------------------------- bodies that are none

NOT_JSON: dict[str, bytes] = {
    "nothing": b"",
    "cut short": b'{"prompt": [1, 2',
    "text": b"hello",
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "nested": b'{"prompt": [1], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of 10,000 digits": b'{"prompt": [1], "seed": ' + b"9" * 10_000 + b"}",
    "a list": b"[1, 2]",
    "a number": b"1",
    "gzip": b"\x1f\x8b\x08\x00" + b"\x00" * 100,
}


@pytest.mark.fault("F33")
async def test_bodies_that_are_no_json(oracle: Cluster) -> None:
    async with nobody_notices(oracle), http_client(oracle.http) as client:
        for name, data in NOT_JSON.items():
            for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
                response = await client.post(path, content=data)
                assert response.status_code == 400, name
                assert_error(response.status_code, response.content, 400, "body")


# ---------------------------------------------------------------- fields

# Field, value, and the field that is named (None: the same).
FIELDS: list[tuple[str, Any, str | None]] = [
    ("prompt", None, None),
    ("prompt", [], None),
    ("prompt", "", None),
    ("prompt", 5, None),
    ("prompt", [1, "a"], None),
    ("prompt", [[1], ["a"]], None),
    ("prompt", [-1], None),
    ("prompt", [VOCAB_SIZE], None),
    ("prompt", [1 << 40], None),
    ("prompt", [1] * 100_000, None),
    ("prompt", ["x"] * 2000, None),
    ("prompt", [[1]] * 600, "n"),
    ("logit_bias", {"a" * 200_000: "x"}, None),
    ("guided_" + "a" * 200_000, 1, "guided_" + "a" * 57),
    ("prompt", "the oracle has no text", None),
    ("max_tokens", "5", None),
    ("max_tokens", -1, None),
    ("max_tokens", 0, None),
    ("max_tokens", 1 << 33, None),
    ("max_tokens", 4.5, None),
    ("max_tokens", True, None),
    ("temperature", "hot", None),
    ("temperature", -1, None),
    ("temperature", 1e40, None),
    ("temperature", float("nan"), None),
    ("temperature", float("inf"), None),
    ("top_p", 0, None),
    ("top_p", 1.5, None),
    ("top_k", -2, None),
    ("top_k", 1 << 40, None),
    ("min_p", 2, None),
    ("repetition_penalty", 0, None),
    ("frequency_penalty", 3, None),
    ("presence_penalty", -3, None),
    ("min_tokens", 1 << 20, None),
    ("logprobs", 21, None),
    ("logprobs", -1, None),
    ("logprobs", True, None),
    ("prompt_logprobs", 21, None),
    ("n", 0, None),
    ("n", 17, None),
    ("n", 1 << 31, None),
    ("seed", 1 << 64, None),
    ("seed", "one", None),
    ("stop", ["x"] * 1000, None),
    ("stop", ["x" * 2000], None),
    ("stop", [5], None),
    ("stop", "a word", None),
    ("stop_token_ids", [VOCAB_SIZE], None),
    ("stop_token_ids", [1] * 1000, None),
    ("logit_bias", {"a": 1}, None),
    ("logit_bias", {"-1": 1}, None),
    ("logit_bias", {str(VOCAB_SIZE): 1}, None),
    ("logit_bias", {"1": 101}, None),
    ("logit_bias", {str(i): 1 for i in range(1025)}, None),
    ("priority", 1 << 40, None),
    ("cache_salt", "x" * 300, None),
    ("request_id", "x" * 200, None),
    ("request_id", "a\r\nset-cookie: b", None),
    ("stream", "yes", None),
    ("stream_options", {"include_usage": True}, None),
    ("stream_options", 5, None),
    ("echo", "yes", None),
    # Known to clients, not to Baton.
    ("suffix", "x", None),
    ("best_of", 3, None),
    ("use_beam_search", True, None),
    ("logits_processors", ["x"], None),
    ("guided_json", {"type": "object"}, None),
    ("guided_regex", "(a+)+$", None),
    ("guided_anything", 1, None),
    ("structured_outputs", {"regex": "a"}, None),
    ("response_format", {"type": "json_object"}, None),
    ("prompt_embeds", "AAAA", None),
    ("lora_request", {"name": "x"}, None),
    ("truncate_prompt_tokens", 5, None),
    ("kv_transfer_params", {"do_remote_decode": True}, None),
    ("bad_words", ["x"], None),
    ("allowed_token_ids", [1], None),
]
CHAT_FIELDS: list[tuple[str, Any, str | None]] = [
    ("messages", None, None),
    ("messages", [], None),
    ("messages", "hello", None),
    ("messages", [{"role": 5}], "messages[0].role"),
    ("messages", [{"content": "x"}], "messages[0].role"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
    (
        "messages",
        [{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}],
        "messages[0].tool_calls",
    ),
    ("messages", [{"role": "user", "content": "x"}] * 20_000, None),
    ("tools", [{"type": "function"}], None),
    ("tool_choice", "auto", None),
    ("functions", [{"name": "f"}], None),
    ("chat_template", "{{ 7 * 7 }}", None),
    ("chat_template_kwargs", {"tokenize": True}, None),
    ("response_format", {"type": "json_schema", "json_schema": {}}, None),
    ("top_logprobs", 5, None),
    ("max_completion_tokens", -5, None),
    ("echo", True, None),
]


@pytest.mark.fault("V6", "V7", "V8")
async def test_fields(oracle: Cluster) -> None:
    async with nobody_notices(oracle), http_client(oracle.http) as client:
        for path, base, fields in (
            (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4}, FIELDS),
            (CHAT, {"messages": MESSAGES, "max_tokens": 4}, CHAT_FIELDS),
        ):
            for field, value, named in fields:
                data = json.dumps({**base, field: value}).encode()
                began_s = asyncio.get_running_loop().time()
                response = await client.post(path, content=data)
                assert response.status_code == 400, (field, value, response.text)
                param = named or field
                text = assert_error(response.status_code, response.content, 400, param)
                assert text.startswith(f"{param}: "), text
                assert asyncio.get_running_loop().time() - began_s < FAST_S


async def test_fields_that_ask_for_nothing(oracle: Cluster) -> None:
    """Nulls, defaults and names that nobody knows are fine."""
    body: dict[str, Any] = {
        "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "model": None, "suffix": None,
        "stop": None, "logprobs": None, "stream_options": None, "seed": None, "n": None,
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1,
        "use_beam_search": False, "guided_json": None, "chat_template_kwargs": {},
        "user": "somebody", "metadata": {"a": 1}, "store": False, "nobody_knows": [1, {"x": None}],
        "logit_bias": {}, "ignore_eos": True,
    }  # fmt: skip
    async with http_client(oracle.http) as client:
        response = await client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_another_model(oracle: Cluster, path: str) -> None:
    body = {"model": "gpt-4", "prompt": PROMPT, "messages": MESSAGES}
    async with http_client(oracle.http) as client:
        response = await client.post(path, json=body)
        assert_error(response.status_code, response.content, 404, "model")


async def test_paths_and_methods(oracle: Cluster) -> None:
    async with http_client(oracle.http) as client:
        for method, path, status in (
            ("GET", "/", 404),
            ("GET", "/v1/nothing", 404),
            ("POST", "/debug/kv", 404),
            ("GET", COMPLETIONS, 405),
            ("DELETE", "/v1/models", 405),
            ("GET", "/v1/models/nothing", 404),
            ("GET", "/../../etc/passwd", 404),
        ):
            response = await client.request(method, path)
            param = "model" if path == "/v1/models/nothing" else None
            assert_error(response.status_code, response.content, status, param)


# ---------------------------------------------------------------- sizes and paces


async def raw(cluster: Cluster, *parts: bytes, pause_s: float = 0.0) -> tuple[int, bytes]:
    """Sends bytes and reads until the other side closes; status and body of the answer."""
    host, _, port = cluster.http.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(20):
            answer = asyncio.ensure_future(_answer(reader))
            for part in parts:
                writer.write(part)
                with suppress(ConnectionError):
                    await writer.drain()
                await asyncio.sleep(pause_s)
                if answer.done():
                    break
            return await answer
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    assert length is not None, head
    return int(head.split()[1]), await reader.readexactly(int(length[1]))


def head(path: str = COMPLETIONS, **headers: object) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: baton", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


@pytest.mark.fault("V18")
async def test_huge_headers_and_bodies(oracle: Cluster) -> None:
    body = b'{"prompt": "' + b"x" * (5 << 20) + b'"}'
    length = {"content-length": len(body)}
    chunk = b"%x\r\n" % (1 << 16) + b"x" * (1 << 16) + b"\r\n"
    async with nobody_notices(oracle):
        for parts, status in (
            ((head(x="a" * (10 << 20)),), 400),
            ((head(**{f"x{i}": i for i in range(20_000)}),), 400),
            ((b"POST /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n",), 400),
            ((head(**length), body), 413),
            ((head(**{"transfer-encoding": "chunked"}), *[chunk] * 80), 413),
            ((b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,), 400),
            ((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",), 404),
        ):
            found, data = await raw(oracle, *parts)
            text = assert_error(found, data, status, None)
            assert status == 404 or str(MAX_BODY_BYTES) in text or "65536" in text


@pytest.mark.fault("V18")
async def test_slow_headers_and_bodies(oracle: Cluster) -> None:
    """A byte now and then keeps no connection open for longer than a request may take."""
    drop = [b"x"] * 100
    length = {"content-length": 1000}
    async with nobody_notices(oracle):
        for parts in (
            (b"",),
            (b"POST /v1/comp",),
            (b"POST / HTTP/1.1\r\nx: ", *drop),
            (head(**length), *drop),
            (head(**{"transfer-encoding": "chunked"}), *[b"1\r\nx\r\n"] * 100),
        ):
            status, data = await raw(oracle, *parts, pause_s=READ_TIMEOUT_S / 8)
            assert_error(status, data, 408, None)


async def test_many_large_bodies_share_one_bound(oracle: Cluster) -> None:
    """150 bodies of almost 1 MiB that do not end: the gateway keeps a part of them."""
    size = MAX_BODY_BYTES - 64
    parts = (head(**{"content-length": MAX_BODY_BYTES}), b"x" * size)
    async with nobody_notices(oracle, MAX_GROWTH_OF_MANY_BYTES):
        found = await asyncio.gather(*(raw(oracle, *parts) for _ in range(150)))
    assert {status for status, _ in found} <= {408, 429}


async def test_slow_large_bodies_keep_no_small_one_out(oracle: Cluster) -> None:
    """As many as take all the memory there is for bodies, and wait."""
    parts = (head(**{"content-length": MAX_BODY_BYTES}), b"x" * (MAX_BODY_BYTES - 64))
    slow = asyncio.gather(*(raw(oracle, *parts) for _ in range(40)))
    async with http_client(oracle.http) as client:
        await asyncio.sleep(READ_TIMEOUT_S / 2)
        body = {"prompt": PROMPT, "max_tokens": 1}
        found = [await client.post(COMPLETIONS, json=body) for _ in range(3)]
    assert 408 in {status for status, _ in await slow}
    assert [response.status_code for response in found] == [200] * 3
