"""Hostile bodies, headers and connections at the HTTP port, beside another tenant's stream."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress

import httpx2
import pytest
import pytest_asyncio
from faults.bystander import INTERNAL, bystander
from faults.keys import MALLORY
from support.cluster import Cluster
from support.openai_http import CHAT, COMPLETIONS, http_client

pytestmark = pytest.mark.asyncio(loop_scope="session")

HEADERS = {"authorization": f"Bearer {MALLORY}"}
MAX_GROWTH_BYTES = 32 << 20
AT_ONCE = 16
MAX_CONNECTIONS = 64

# As they stand in a body: JSON of any kind, and numbers that JSON does not have.
VALUES = [
    "NaN", "Infinity", "-Infinity", "-0.0", "5e-324", "1e308", "1e400", "-1", "0", "1", "0.5",
    "2147483647", "2147483648", "-2147483649", "4294967296", "9223372036854775808",
    "18446744073709551616",
    "true", "null", '""', '"1"', '"\\u0000"', '"../../etc/passwd"', '"http://127.0.0.1:1/x"',
    "[]", "[null]", "[[]]", '["a", 1]', "{}", '{"$ref": "#"}', '{"0": 1e400}',
]  # fmt: skip
FIELDS = [
    "frequency_penalty", "ignore_eos", "include_stop_str_in_output", "logit_bias", "max_tokens",
    "min_p", "min_tokens", "n", "presence_penalty", "priority", "prompt_logprobs",
    "repetition_penalty", "request_id", "return_token_ids", "seed", "skip_special_tokens", "stop",
    "stop_token_ids", "stream", "stream_options", "temperature", "top_k", "top_p", "cache_salt",
    "add_special_tokens", "echo", "logprobs", "prompt", "model", "best_of", "guided_regex",
    "guided_json", "response_format", "chat_template", "prompt_embeds", "tools",
]  # fmt: skip


def bodies() -> Iterator[tuple[str, str, str]]:
    """Label, path and body."""
    for field in FIELDS:
        for value in VALUES:
            given = {"prompt": "[1, 2, 3]", "max_tokens": "2", field: value}
            text = "{" + ", ".join(f'"{name}": {part}' for name, part in given.items()) + "}"
            yield f"{field}={value}", COMPLETIONS, text
    for value in VALUES:
        yield f"messages={value}", CHAT, f'{{"messages": {value}}}'
        message = f'{{"role": {value}, "content": {value}}}'
        yield f"message of {value}", CHAT, f'{{"messages": [{message}]}}'
        yield f"tokenize {value}", "/tokenize", f'{{"prompt": {value}}}'
        yield f"detokenize {value}", "/detokenize", f'{{"tokens": {value}}}'
    yield "a name twice", COMPLETIONS, '{"prompt": [1], "prompt": [2], "max_tokens": 1}'
    yield "a regex bomb", COMPLETIONS, '{"prompt": [1], "guided_regex": "(a+)+$"}'
    yield (
        "a grammar bomb",
        COMPLETIONS,
        '{"prompt": [1], "guided_json": ' + "[" * 500 + "]" * 500 + "}",
    )


@pytest_asyncio.fixture(loop_scope="session")
async def client(guarded: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with http_client(guarded.http) as client:
        yield client


@pytest.mark.fault("V4", "V6", "V7", "V9", "V11", "V12", "V21", "F34")
async def test_hostile_values_in_every_field(guarded: Cluster, client: httpx2.AsyncClient) -> None:
    gate = asyncio.Semaphore(AT_ONCE)
    headers = {**HEADERS, "content-type": "application/json"}
    wrong: list[str] = []
    statuses: dict[int, int] = {}

    async def one(label: str, path: str, body: str) -> None:
        async with gate:
            response = await client.post(path, content=body, headers=headers)
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        if response.status_code >= 500 or not _is_well_formed(response):
            wrong.append(f"{label}: {response.status_code} {response.text[:200]}")

    async with bystander(guarded, MAX_GROWTH_BYTES):
        await asyncio.gather(*(one(*case) for case in bodies()))
    print(statuses)
    assert sum(statuses.values()) >= 300
    assert wrong == []


def _is_well_formed(response: httpx2.Response) -> bool:
    if response.status_code == 200:
        return True
    error = response.json()["error"]
    return error["code"] == response.status_code and not INTERNAL.search(error["message"])


# ---------------------------------------------------------------- bytes on a connection

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
KEY = b"authorization: Bearer " + MALLORY.encode() + b"\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
RAW: dict[str, bytes] = {
    "random": bytes(range(256)) * 8,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 64,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
    "HTTP/0.9": b"GET /\r\n\r\n",
    "no such version": b"GET / HTTP/9.9\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "a header without a colon": POST + b"nonsense\r\n\r\n",
    "a header with a NUL": POST + b"x: a\x00b\r\n\r\n",
    "a name with a space": POST + b"content length: 5\r\n\r\nhello",
    "two lengths": POST + KEY + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
    "a negative length": POST + KEY + b"content-length: -1\r\n\r\n",
    "a length in words": POST + KEY + b"content-length: five\r\n\r\nhello",
    "an endless length": POST + KEY + b"content-length: " + b"9" * 400 + b"\r\n\r\n",
    "two framings": POST + KEY + b"content-length: 4\r\n" + CHUNKED + b"0\r\n\r\n",
    "a huge chunk": POST + KEY + CHUNKED + b"f" * 40 + b"\r\n",
    "a negative chunk": POST + KEY + CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    "another coding": POST + KEY + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "10,000 headers": POST + b"".join(b"x-%d: y\r\n" % i for i in range(10_000)) + b"\r\n",
    "1 MB of a header": POST + b"x: " + b"a" * (1 << 20) + b"\r\n\r\n",
    "an endless target": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "another host's": b"GET http://127.0.0.1:1/ HTTP/1.1\r\nhost: x\r\n\r\n",
    "a tunnel": b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nhost: x\r\n\r\n",
    "a path upwards": b"GET /../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n",
    "a host that is a path": b"GET /debug/kv HTTP/1.1\r\nhost: x/../health\r\n\r\n",
    "a web socket": b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"\r\n",
    "nothing": b"",
}  # fmt: skip


@pytest.mark.fault("V18", "V20")
async def test_bytes_that_are_no_request(guarded: Cluster) -> None:
    async with bystander(guarded, MAX_GROWTH_BYTES):
        answers = await asyncio.gather(*(_answer(guarded, data) for data in RAW.values()))
    for name, answer in zip(RAW, answers, strict=True):
        assert not answer or answer.startswith(b"HTTP/1.1 4"), f"{name}: {answer[:200]!r}"
        said = re.sub(rb'"type": ?"\w+"', b"", answer).decode("latin-1")
        assert not INTERNAL.search(said), f"{name}: {said}"


async def _answer(cluster: Cluster, data: bytes, timeout_s: float = 3.0) -> bytes:
    """What comes until the other side closes, or for so long."""
    host, _, port = cluster.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    try:
        with suppress(ConnectionError, TimeoutError):
            writer.write(data)
            async with asyncio.timeout(timeout_s):
                while part := await reader.read(1 << 16):
                    answer += part
    finally:
        writer.close()
    return answer


@pytest.mark.fault("V18", "V20")
async def test_a_body_in_crumbs(guarded: Cluster) -> None:
    """20,000 chunks of one byte cost 0.2 s of the event loop, before any key was looked at."""
    data = POST + CHUNKED + b"1\r\n \r\n" * 20_000
    async with bystander(guarded, MAX_GROWTH_BYTES):
        answers = await asyncio.gather(*(_answer(guarded, data) for _ in range(10)))
    for answer in answers:
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401")), answer[:100]


async def test_chunks_of_a_sensible_size_are_taken(client: httpx2.AsyncClient) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b'{"prompt": [1, 2, 3], "max_tokens": 1, "user": "'
        for _ in range(3000):
            yield b"x" * 100
        yield b'"}'

    headers = {**HEADERS, "content-type": "application/json"}
    response = await client.post(COMPLETIONS, content=parts(), headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.fault("F32", "F30")
async def test_idle_connections_shut_nobody_out(guarded: Cluster) -> None:
    """As many as there may be and more, some that never sent anything, some kept alive."""
    host, _, port = guarded.http.rpartition(":")
    async with AsyncExitStack() as stack:
        for number in range(3 * MAX_CONNECTIONS):
            connection = socket.create_connection((host, int(port)))
            stack.callback(connection.close)
            if number % 2:
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        async with http_client(guarded.http) as client:
            body = {"prompt": [1, 2, 3], "max_tokens": 2}
            for _ in range(20):
                response = await client.post(COMPLETIONS, json=body, headers=HEADERS)
                assert response.status_code == 200, response.text


# ---------------------------------------------------------------- what is written down

INJECTION = '\r\n\x1b[2J{"level": "error"} ' + "A" * 100


@pytest.mark.fault("V22")
async def test_ids_cannot_forge_log_lines_or_series(
    guarded: Cluster, client: httpx2.AsyncClient
) -> None:
    async def series() -> int:
        text = (await client.get("/metrics", headers=HEADERS)).text
        return sum(not line.startswith("#") for line in text.splitlines())

    body = {"prompt": [1, 2, 3], "max_tokens": 1}
    await client.post(COMPLETIONS, json=body, headers=HEADERS)
    before = await series()
    for number in range(100):
        for changed in (
            {"request_id": INJECTION[: 20 + number]},
            {"model": f"model-{number}{INJECTION}"},
            {"user": f"{number}{INJECTION}"},
            {f"field-{number}{INJECTION}": 1},
        ):
            await client.post(COMPLETIONS, json={**body, **changed}, headers=HEADERS)
    assert await series() == before
    (log,) = guarded.log.parent.glob("gateway-0.log")
    lines = log.read_bytes().splitlines()
    assert len(lines) > 100
    for line in lines:
        assert b"\x1b" not in line and len(line) < 4096
        json.loads(line)
