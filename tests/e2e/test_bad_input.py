"""What cannot be served is refused at once, by field and limit, and harms nobody.

All cases run beside one long stream on the oracle model; the texts need the default model.
"""

import asyncio
import json
import math
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio
from support.answers import answer_of
from support.cluster import Cluster, baton_up
from support.engines import VOCAB_SIZE, prompt_of

from common.client import BatonClient, Chat, Sampling, make_request
from common.errors import BatonError, InvalidRequest, Unavailable
from common.rpc import make_public_channel, to_baton_error
from common.types import FinishReason, SamplingParams
from common.wire import INFERENCE_SERVICE, inference
from engine.oracle import reference_ids

FAST_S = 3.0
NUM_BLOCKS, BLOCK_SIZE = 64, 16
POOL_TOKENS = NUM_BLOCKS * BLOCK_SIZE
MAX_MODEL_LEN = 4096
MAX_MESSAGE_BYTES = 1 << 20
FLAGS = [
    *("--num-blocks", str(NUM_BLOCKS), "--max-model-len", str(MAX_MODEL_LEN)),
    *("--max-message-bytes", str(MAX_MESSAGE_BYTES), "--step-delay-ms", "5", "--lease-s", "3"),
]
GENERATE = f"/{INFERENCE_SERVICE}/Generate"
NAN, INF = math.nan, math.inf
HUGE = 2**32 - 1
PROMPT = (1, 2, 3)

# Paths, addresses, process ids, tracebacks and names of our own code.
INTERNAL = re.compile(
    r"/\w+/|\d+\.\d+\.\d+\.\d+|localhost|:\d{4,5}\b|\bpid\b"
    r"|Traceback|File \"|Error\b|\.py\b|0x[0-9a-f]"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with baton_up(tmp_path_factory.mktemp("bad-input"), flags=FLAGS) as cluster:
        yield cluster


@pytest.fixture
async def channel(cluster: Cluster) -> AsyncIterator[aio.Channel]:
    async with make_public_channel(cluster.grpc) as channel:
        yield channel


async def send(channel: aio.Channel, data: bytes) -> BatonError | None:
    """The error that these bytes are answered with, None for an answer without one."""
    generate = channel.unary_stream(GENERATE)
    try:
        async for _ in generate(data, timeout=30):
            pass
    except aio.AioRpcError as error:
        return to_baton_error(error)
    return None


async def published(cluster: Cluster) -> int:
    (gateway,) = cluster.of_role("gateway")
    counters = (await cluster.debug(gateway, "gateway"))["counters"]
    return int(counters["jobs_published"])


@asynccontextmanager
async def nobody_notices(cluster: Cluster) -> AsyncIterator[None]:
    """Around refusals: nothing is published, every process stays, nothing stays held, and a stream
    that began before them goes on, right and without a pause, until after them."""
    pids = [process.pid for process in cluster.processes]
    async with BatonClient(cluster.grpc) as client:
        stream = _Stream(client)
        await stream.has(2)
        before = await published(cluster)
        yield
        assert await published(cluster) == before
        await stream.has(len(stream.token_ids) + 2)
        await stream.leave()
    stream.assert_right()
    await cluster.until_clean()
    assert [process.pid for process in cluster.processes] == pids


class _Stream:
    """A long answer under way."""

    def __init__(self, client: BatonClient) -> None:
        self.token_ids: list[int] = []
        self._arrivals_s: list[float] = []
        self._prompt = prompt_of(7, 40)
        self._came = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(client))

    async def _run(self, client: BatonClient) -> None:
        clock = asyncio.get_running_loop().time
        async for chunk in client.generate(self._prompt, greedy(POOL_TOKENS - 40)):
            self.token_ids += chunk.token_ids
            self._arrivals_s.append(clock())
            self._came.set()

    async def has(self, num_tokens: int) -> None:
        async with asyncio.timeout(FAST_S):
            while len(self.token_ids) < num_tokens:
                assert not self._task.done(), "the stream was over too early"
                self._came.clear()
                await self._came.wait()

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def assert_right(self) -> None:
        assert self.token_ids == right_ids(self._prompt, len(self.token_ids))
        assert max(b - a for a, b in pairwise(self._arrivals_s)) < FAST_S


def greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, seed=0)


def right_ids(prompt: Sequence[int], num_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0)
    return reference_ids(prompt, params, VOCAB_SIZE)


def assert_refusal(error: BatonError | None, field: str, *limits: str) -> None:
    """INVALID_ARGUMENT that names the field and its limit, and nothing internal."""
    assert isinstance(error, InvalidRequest), f"{field}: {error!r}"
    assert error.field == field, f"{field}: {error.message}"
    text = error.message.removeprefix(f"{field}: ")
    assert error.message.startswith(f"{field}: ")
    for limit in limits:
        assert limit in text, f"{field}: {text}"
    assert not INTERNAL.search(text), text


# ---------------------------------------------------------------- numbers

# field: what is refused, and the limit that the text names.
NUMBERS: dict[str, tuple[list[float], str]] = {
    "temperature": ([NAN, INF, -INF, -0.1, -1e30, 1e30, 100.5], "100"),
    "top_p": ([NAN, INF, -INF, 0.0, -0.1, 1.01, 1e30], "1"),
    "top_k": ([-2, -(2**31)], "positive"),
    "min_p": ([NAN, INF, -INF, -0.01, 1.01, 1e30], "1"),
    "repetition_penalty": ([NAN, INF, -INF, 0.0, -1.0, 10.5, 1e30], "10"),
    "frequency_penalty": ([NAN, INF, -INF, -2.1, 2.1, 1e30], "2"),
    "presence_penalty": ([NAN, INF, -INF, -2.1, 2.1, -1e30], "2"),
    "max_tokens": ([HUGE, POOL_TOKENS - len(PROMPT) + 1], f"at most {POOL_TOKENS - len(PROMPT)}"),
    "min_tokens": ([9, HUGE], "8"),
    "logprobs": ([21, HUGE], "20"),
    "prompt_logprobs": ([21, HUGE], "20"),
}


def _numbers() -> list[tuple[str, str, inference.GenerateRequest]]:
    cases = []
    for field, (values, limit) in NUMBERS.items():
        for value in values:
            request = make_request(PROMPT, Sampling(max_tokens=8))
            setattr(request.sampling, field, value)
            cases.append((field, limit, request))
    return cases


def _more() -> list[tuple[str, str, inference.GenerateRequest]]:
    def sampling(**fields: Any) -> inference.GenerateRequest:
        return make_request(PROMPT, Sampling(**{"max_tokens": 8, **fields}))

    def prompt(ids: list[int], max_tokens: int | None = 8) -> inference.GenerateRequest:
        return make_request(ids, Sampling(max_tokens=max_tokens))

    vocabulary = str(VOCAB_SIZE)
    return [
        ("prompt", vocabulary, prompt([1, VOCAB_SIZE])),
        ("prompt", vocabulary, prompt([HUGE])),
        ("prompt", "at least one", prompt([])),
        ("prompt", str(POOL_TOKENS), prompt([1] * (MAX_MODEL_LEN + 1))),
        ("prompt", str(POOL_TOKENS), prompt([1] * (POOL_TOKENS + 1))),
        ("prompt", str(POOL_TOKENS), prompt([1] * POOL_TOKENS)),
        ("prompt", str(POOL_TOKENS), prompt([1] * POOL_TOKENS, max_tokens=None)),
        ("max_tokens", "at most 1", prompt([1] * (POOL_TOKENS - 1))),
        ("prompt", str(NUM_BLOCKS), prompt([1] * (POOL_TOKENS - 1), max_tokens=1)),
        ("logit_bias", vocabulary, sampling(logit_bias={VOCAB_SIZE: 1.0})),
        ("logit_bias", "100", sampling(logit_bias={1: NAN})),
        ("logit_bias", "100", sampling(logit_bias={1: INF})),
        ("logit_bias", "100", sampling(logit_bias={1: -100.5})),
        ("logit_bias", "1024", sampling(logit_bias=dict.fromkeys(range(1025), 1.0))),
        ("stop_token_ids", vocabulary, sampling(stop_token_ids=[VOCAB_SIZE])),
        ("stop_token_ids", "128", sampling(stop_token_ids=[1] * 129)),
        ("stop", "16", sampling(stop=["x"] * 17)),
        ("stop", "1024", sampling(stop=["x" * 1025])),
        ("stop", "1", sampling(stop=[""])),
        ("stop", "stop_token_ids", sampling(stop=["a word"])),
        ("n", "16", make_request(PROMPT, Sampling(max_tokens=8), n=0)),
        ("n", "16", make_request(PROMPT, Sampling(max_tokens=8), n=17)),
        ("n", "16", make_request(PROMPT, Sampling(max_tokens=8), n=HUGE)),
        ("request_id", "128", make_request(PROMPT, request_id="x" * 129)),
        ("cache_salt", "256", make_request(PROMPT, cache_salt="x" * 257)),
        ("max_tokens", "at least 1", prompt([1], max_tokens=0)),
        ("input", "token_ids", inference.GenerateRequest()),
        ("text", "token_ids", make_request("this model has no text")),
        ("chat", "token_ids", make_request(Chat((("user", "hello"),)))),
    ]


async def test_fields_out_of_their_limits(cluster: Cluster, channel: aio.Channel) -> None:
    async with nobody_notices(cluster):
        loop = asyncio.get_running_loop()
        for field, limit, request in [*_numbers(), *_more()]:
            began_s = loop.time()
            error = await send(channel, request.SerializeToString())
            assert_refusal(error, field, limit)
            assert loop.time() - began_s < FAST_S


async def test_zero_tokens_are_for_prompt_logprobs_only(cluster: Cluster) -> None:
    async with BatonClient(cluster.grpc) as client:
        with pytest.raises(InvalidRequest, match="max_tokens: must be at least 1"):
            await answer_of(client, PROMPT, Sampling(max_tokens=0))
        answer = await answer_of(client, PROMPT, Sampling(max_tokens=0, prompt_logprobs=0))
        assert len(answer.prompt_logprobs) == 3


async def test_the_default_of_max_tokens_is_what_fits_the_pool(cluster: Cluster) -> None:
    prompt = [1] * (POOL_TOKENS - 40)
    async with BatonClient(cluster.grpc) as client:
        answer = await answer_of(client, prompt, Sampling(temperature=0.0))
    assert len(answer.token_ids) == 40
    assert answer.complete.finish_reason is FinishReason.LENGTH


# ---------------------------------------------------------------- messages


def _varint_field(number: int, wire_type: int) -> bytes:
    return bytes([number << 3 | wire_type])


async def test_messages_that_are_none(cluster: Cluster, channel: aio.Channel) -> None:
    good = make_request(PROMPT, Sampling(max_tokens=8)).SerializeToString()
    bad = {
        "cut short": good[:-1],
        "a length beyond the end": _varint_field(5, 2) + b"\x7f",
        "a tag without a number": b"\x00\x00",
        "an endless varint": b"\xff" * 12,
        "wire type 7": b"\x0f" * 4,
        "text": b"hello, is there anybody?",
        "random": bytes(range(255, 128, -1)),
        "UTF-8 that breaks off": _varint_field(2, 2) + b"\x02\xc3\x28",
        "a surrogate as UTF-8": _varint_field(2, 2) + b"\x03\xed\xa0\x80",
        "an id that is no UTF-8": _varint_field(1, 2) + b"\x01\xff",
    }
    async with nobody_notices(cluster):
        for name, data in bad.items():
            error = await send(channel, data)
            assert error is not None, name
            assert_refusal(error, "message", "protobuf")


async def test_oversized_messages(cluster: Cluster, channel: aio.Channel) -> None:
    async with nobody_notices(cluster):
        salt = "x" * MAX_MESSAGE_BYTES
        data = make_request(PROMPT, cache_salt=salt).SerializeToString()
        assert_refusal(await send(channel, data), "message", str(MAX_MESSAGE_BYTES))
        # What is more than twice the limit is not even read: gRPC's own status.
        error = await send(channel, b"\x00" * (2 * MAX_MESSAGE_BYTES + 1))
        assert error is not None and error.grpc_code == "RESOURCE_EXHAUSTED"
        assert not INTERNAL.search(error.message)


# ---------------------------------------------------------------- texts


async def test_texts_that_are_no_prompt(smollm2: Cluster) -> None:
    before = await published(smollm2)
    megabyte = "word " * 209_716
    async with BatonClient(smollm2.grpc) as client, make_public_channel(smollm2.grpc) as channel:
        info = await client.model_info()
        limit = str(info.max_model_len)
        loop = asyncio.get_running_loop()
        refused: dict[str, tuple[Any, str, str]] = {
            "1 MB": (megabyte, "text", limit),
            "1 MB without a space": ("\N{GRINNING FACE}" * (1 << 18), "text", limit),
            "1 MB of chat": (Chat((("user", megabyte),)), "messages[0].content", limit),
            "empty": ("", "prompt", "at least one"),
            "no messages": (Chat(()), "messages", ""),
            "a role that is none": (Chat((("nobody", "x"),)), "messages[0].role", ""),
            "more than the context": ([1] * (info.max_model_len + 1), "prompt", limit),
            "ids": ([info.vocab_size], "prompt", str(info.vocab_size)),
        }
        for name, (prompt, field, text) in refused.items():
            began_s = loop.time()
            data = make_request(prompt, Sampling(max_tokens=4)).SerializeToString()
            error = await send(channel, data)
            assert error is not None, name
            assert_refusal(error, field, text)
            assert loop.time() - began_s < FAST_S, name
        with pytest.raises(InvalidRequest):
            await answer_of(client, "\ud800", Sampling(max_tokens=4))
    assert await published(smollm2) == before


@pytest.mark.parametrize(
    "prompt",
    ["<|im_start|><|im_end|>", "<|endoftext|>", " ", " \n\t \n\n", "\0", "\N{GRINNING FACE}"],
    ids=["special tokens", "one special token", "a space", "white space", "NUL", "one character"],
)
async def test_odd_texts_are_served(smollm2: Cluster, prompt: str) -> None:
    async with BatonClient(smollm2.grpc) as client:
        sampling = Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)
        answer = await answer_of(client, prompt, sampling)
    assert len(answer.token_ids) == 3
    assert answer.complete.usage.prompt_tokens >= 1


# ---------------------------------------------------------------- workers that are not there


async def statistics_until(cluster: Cluster, condition: Callable[[dict[str, Any]], bool]) -> None:
    (gateway,) = cluster.of_role("gateway")
    async with asyncio.timeout(15):
        while True:
            if condition(await cluster.debug(gateway, "gateway")):
                return
            await asyncio.sleep(0.05)


async def test_without_a_prefill_worker(cluster: Cluster) -> None:
    """UNAVAILABLE at once, naming the pool; served by a decode worker that always computes
    prompts itself."""
    (prefill,) = cluster.of_role("prefill")
    loop = asyncio.get_running_loop()
    prefill.kill(signal.SIGSTOP)
    try:
        await statistics_until(cluster, lambda s: s["num_prefill_workers"] == 0)
        async with make_public_channel(cluster.grpc) as channel:
            before, began_s = await published(cluster), loop.time()
            error = await send(channel, make_request(PROMPT, greedy(5)).SerializeToString())
            assert isinstance(error, Unavailable) and error.pool == "prefill"
            assert "prefill" in error.message and not INTERNAL.search(error.message)
            assert loop.time() - began_s < FAST_S
            assert await published(cluster) == before
        flags = ("--local-prefill", "always", "--worker-id", "both-x")
        async with cluster.another("decode", *flags), BatonClient(cluster.grpc) as client:
            answer = await answer_of(client, PROMPT, greedy(5))
            assert answer.token_ids == right_ids(PROMPT, 5)
            assert answer.complete.usage.decode_computed == len(PROMPT)
    finally:
        prefill.kill(signal.SIGCONT)
    await statistics_until(cluster, lambda s: s["num_prefill_workers"] == 1)
    async with BatonClient(cluster.grpc) as client:
        answer = await answer_of(client, PROMPT, greedy(5))
        assert answer.token_ids == right_ids(PROMPT, 5)


async def test_a_worker_that_does_not_fit_is_refused(cluster: Cluster) -> None:
    """At registration, with the field that differs; nothing is ever routed to it."""
    flags = ("--block-size", "32", "--num-blocks", "512", "--worker-id", "odd-x")
    async with (
        cluster.another("decode", *flags, joins=False) as odd,
        BatonClient(cluster.grpc) as client,
    ):
        await statistics_until(cluster, lambda s: s["num_refused_workers"] == 1)
        status = await _baton_status(cluster)
        (refused,) = status["refused"]
        assert refused == {
            "id": odd.id, "role": "decode", "field": "layout.block_size",
            "expected": "16", "actual": "32",
        }  # fmt: skip
        assert odd.id not in {worker["id"] for worker in status["workers"]}
        answers = await asyncio.gather(*(answer_of(client, PROMPT, greedy(5)) for _ in range(8)))
        assert all(answer.token_ids == right_ids(PROMPT, 5) for answer in answers)
        statistics = await cluster.debug(odd, "statistics")
        assert (statistics["streams"], statistics["started"]) == (0, 0)
    await statistics_until(cluster, lambda s: s["num_refused_workers"] == 0)


async def _baton_status(cluster: Cluster) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "status", "--json", "--address", cluster.grpc),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return dict(json.loads(output))
