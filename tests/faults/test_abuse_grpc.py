"""Hostile values in every field of GenerateRequest, and hostile bytes instead of one.

All against one running cluster while another tenant's stream goes on: a case is refused by the name
of its field, or served; it is never an internal error, and nobody else notices.
"""

import asyncio
import gzip
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
from faults.bystander import INTERNAL, bystander
from faults.keys import MALLORY
from grpc import aio
from support.cluster import Cluster
from support.engines import VOCAB_SIZE

from common.rpc import make_public_channel
from common.wire import INFERENCE_SERVICE, inference, inference_grpc

pytestmark = pytest.mark.asyncio(loop_scope="session")

METADATA = (("authorization", f"Bearer {MALLORY}"),)
GENERATE = f"/{INFERENCE_SERVICE}/Generate"
AT_ONCE = 16
MAX_GROWTH_BYTES = 32 << 20
NAN, INF = math.nan, math.inf
TINY, HUGE = 5e-45, 3.4e38

UINT32S = [0, 1, 2, 20, 21, 1024, 65_536, 2**31 - 1, 2**31, 2**32 - 1]
INT32S = [-(2**31), -1_000_000, -2, -1, 0, 1, 2**31 - 1]
FLOATS = [NAN, INF, -INF, -0.0, 0.0, TINY, -TINY, -1.0, 1e-30, 0.5, 1.0, 1.0000001, 2.0, 2.1, 1e10,
          HUGE, -HUGE]  # fmt: skip
IDS = [0, 1, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31 - 1, 2**31, 2**32 - 1]
TEXTS = ["", " ", "\0", "\n", "é", "\u202e", "\ud7ff", "a" * 64, "a" * 4096, "a" * 100_000,
         "../../etc/passwd", "http://127.0.0.1:1/", "${jndi:ldap://x}", "{{7*7}}", "%s%n", "' OR 1",
         "\x1b[2J", "<|im_end|>"]  # fmt: skip
FLOAT_FIELDS = ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty",
                "presence_penalty"]  # fmt: skip
UINT_FIELDS = ["max_tokens", "min_tokens", "logprobs", "prompt_logprobs"]


def request(prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 2) -> Any:
    message = inference.GenerateRequest(token_ids=inference.TokenIds(ids=prompt))
    message.sampling.max_tokens = max_tokens
    return message


def cases() -> Iterator[tuple[str, Any]]:
    """Label and message."""
    for field in FLOAT_FIELDS:
        for value in FLOATS:
            message = request()
            setattr(message.sampling, field, value)
            yield f"{field}={value!r}", message
    for field in UINT_FIELDS:
        for value in UINT32S:
            message = request()
            setattr(message.sampling, field, value)
            yield f"{field}={value}", message
    for value in INT32S:
        message = request()
        message.sampling.top_k = value
        yield f"top_k={value}", message
        message = request()
        message.priority = value
        yield f"priority={value}", message
    for value in (0, 1, 2, 16, 17, 2**31 - 1, 2**32 - 1):
        message = request()
        message.n = value
        yield f"n={value}", message
    for seed in (0, 1, 2**63 - 1, 2**63, 2**64 - 1):
        message = request()
        message.sampling.seed = seed
        yield f"seed={seed}", message
    yield from _cases_of_ids()
    yield from _cases_of_texts()


def _cases_of_ids() -> Iterator[tuple[str, Any]]:
    for value in IDS:
        yield f"prompt id {value}", request((1, value))
        message = request()
        message.sampling.stop_token_ids.append(value)
        yield f"stop id {value}", message
        for bias in (0.0, 100.0, 101.0, NAN, -INF):
            message = request()
            message.sampling.logit_bias[value] = bias
            yield f"logit_bias[{value}]={bias!r}", message
    for count in (0, 1, 62 * 16, 63 * 16, 64 * 16, 64 * 16 + 1, 100_000):
        yield f"{count} prompt ids", request([1] * count)
    for count in (16, 17, 1024, 100_000):
        message = request()
        message.sampling.stop_token_ids.extend([2] * count)
        yield f"{count} stop ids", message
    message = request()
    message.sampling.logit_bias.update({i: 1.0 for i in range(VOCAB_SIZE)})
    yield "all ids biased", message
    message = request()
    message.sampling.logit_bias.update({i: 1.0 for i in range(50_000)})
    yield "50,000 ids biased", message


def _cases_of_texts() -> Iterator[tuple[str, Any]]:
    for text in TEXTS:
        label = f"{text[:12]!r} x {len(text)}"
        for field in ("request_id", "cache_salt"):
            message = request()
            setattr(message, field, text)
            yield f"{field} {label}", message
        message = request()
        message.sampling.stop.append(text)
        yield f"stop {label}", message
        yield f"text {label}", inference.GenerateRequest(text=text)
        chat = inference.ChatInput(messages=[inference.ChatMessage(role="user", content=text)])
        yield f"chat {label}", inference.GenerateRequest(chat=chat)
        chat = inference.ChatInput(messages=[inference.ChatMessage(role=text, content="x")])
        yield f"role {label}", inference.GenerateRequest(chat=chat)
    message = request()
    message.sampling.stop.extend(["x"] * 10_000)
    yield "10,000 stop strings", message
    yield "nothing at all", inference.GenerateRequest()


@pytest_asyncio.fixture(loop_scope="session")
async def channel(guarded: Cluster) -> AsyncIterator[aio.Channel]:
    async with make_public_channel(guarded.grpc) as channel:
        yield channel


@pytest.mark.fault("V6", "V7", "V8", "V9", "V21", "F34", "F19")
async def test_hostile_values_in_every_field(guarded: Cluster, channel: aio.Channel) -> None:
    stub = inference_grpc.InferenceServiceStub(channel)
    gate = asyncio.Semaphore(AT_ONCE)
    ends: dict[str, str] = {}

    async def one(label: str, message: Any) -> None:
        async with gate:
            ends[label] = await _end(stub.Generate(message, metadata=METADATA, timeout=20))

    async with bystander(guarded, MAX_GROWTH_BYTES):
        await asyncio.gather(*(one(label, message) for label, message in cases()))
    print(f"{len(ends)} cases: {len([e for e in ends.values() if e == 'served'])} served")
    assert len(ends) >= 300
    wrong = {label: end for label, end in ends.items() if not end.startswith(("served", "INVALID"))}
    assert wrong == {}
    told = {label: end for label, end in ends.items() if INTERNAL.search(end)}
    assert told == {}


async def _end(call: Any) -> str:
    """ "served", or the status and its text."""
    try:
        async for _ in call:
            pass
    except aio.AioRpcError as error:
        name = error.code().name
        return (
            f"INVALID {error.details()}"
            if name == "INVALID_ARGUMENT"
            else (f"{name} {error.details()}")
        )
    return "served"


# ---------------------------------------------------------------- bytes


def _nested(depth: int) -> bytes:
    """A message in a message in a message, of an unknown field."""
    data = b""
    for _ in range(depth):
        data = b"\xfa\x01" + _varint(len(data)) + data
        if len(data) > 100_000:
            break
    return data


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


BYTES: dict[str, bytes] = {
    "random": bytes(range(256)),
    "a length beyond the end": b"\x12\xff\xff\xff\x7f",
    "an endless varint": b"\xff" * 64,
    "bad UTF-8 in text": b"\x12\x02\xff\xfe",
    "field 0": b"\x00\x00",
    "an unclosed group": b"\x0b" * 50,
    "nested groups": b"\x0b" * 5000 + b"\x0c" * 5000,
    "nested 200 deep": _nested(200),
    "a pickle": b"\x80\x04\x95" + b"cos\nsystem\n(S'true'\ntR.",
}


@pytest.mark.fault("F33", "V19")
async def test_bytes_that_are_no_message(guarded: Cluster, channel: aio.Channel) -> None:
    async with bystander(guarded, MAX_GROWTH_BYTES):
        for name, data in BYTES.items():
            end = await _end(channel.unary_stream(GENERATE)(data, metadata=METADATA, timeout=10))
            assert end.startswith("INVALID"), f"{name}: {end}"
            assert not INTERNAL.search(end), f"{name}: {end}"


@pytest.mark.fault("V18")
async def test_compression_bombs(guarded: Cluster, channel: aio.Channel) -> None:
    """Some 50 KB that become 50 MB."""
    data = b"\x12" + _varint(50 << 20) + bytes(50 << 20)
    print(f"{len(gzip.compress(data)):,} bytes on the wire")
    generate = channel.unary_stream(GENERATE)
    async with bystander(guarded, MAX_GROWTH_BYTES):
        for _ in range(4):
            call = generate(data, metadata=METADATA, timeout=20, compression=grpc.Compression.Gzip)
            end = await _end(call)
            assert end.startswith("RESOURCE_EXHAUSTED"), end


@pytest.mark.fault("V18")
async def test_large_metadata(guarded: Cluster, channel: aio.Channel) -> None:
    stub = inference_grpc.InferenceServiceStub(channel)
    async with bystander(guarded, MAX_GROWTH_BYTES):
        for size in (20_000, 1 << 20):
            metadata = (*METADATA, ("x-large", "a" * size))
            end = await _end(stub.Generate(request(), metadata=metadata, timeout=10))
            assert end.startswith(("RESOURCE_EXHAUSTED", "UNAVAILABLE", "served")), end


@pytest.mark.fault("V19", "V17")
async def test_rapid_resets(guarded: Cluster, channel: aio.Channel) -> None:
    """CVE-2023-44487: opened and reset before anything is answered."""
    stub = inference_grpc.InferenceServiceStub(channel)
    message = request(range(1, 60), 50)
    async with bystander(guarded, MAX_GROWTH_BYTES):
        for _ in range(40):
            calls = [stub.Generate(message, metadata=METADATA) for _ in range(50)]
            for call in calls:
                call.cancel()
            await asyncio.gather(*(_left(call) for call in calls))


async def _left(call: Any) -> None:
    try:
        await call.read()
    except (asyncio.CancelledError, aio.AioRpcError):
        return


@pytest.mark.fault("V6")
async def test_the_most_that_one_may_ask_for(guarded: Cluster, channel: aio.Channel) -> None:
    """n, logprobs, prompt_logprobs and stop lists at their limits, several at once: bounded."""
    stub = inference_grpc.InferenceServiceStub(channel)
    message = request(range(100), 16)
    message.n = 16
    sampling = message.sampling
    sampling.logprobs = sampling.prompt_logprobs = 20
    sampling.temperature = 1.5
    sampling.stop_token_ids.extend(range(400, 410))
    sampling.logit_bias.update({i: 0.5 for i in range(200)})
    gateway = psutil.Process(guarded.of_role("gateway")[0].pid)
    before = gateway.memory_info().rss
    async with bystander(guarded, 4 * MAX_GROWTH_BYTES):
        ends = await asyncio.gather(
            *(_end(stub.Generate(message, metadata=METADATA, timeout=60)) for _ in range(4))
        )
    print(f"{ends}; grown by {(gateway.memory_info().rss - before) >> 20} MiB")
    for end in ends:
        assert end.startswith(("served", "INVALID", "RESOURCE_EXHAUSTED")), end
