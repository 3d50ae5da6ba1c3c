"""One trace a request, one tree over all processes, however the request ends."""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio
from support.cluster import Cluster, baton_up
from support.collector import Collector, collecting
from support.engines import prompt_of

from cli.otlp import TraceSpan
from common.client import Sampling, make_request
from common.errors import InternalError
from common.rpc import make_public_channel, to_baton_error
from common.wire import inference, inference_grpc
from engine.oracle import oracle_layout

SMALL_POOL, LARGE_POOL = 64, 256
CHUNK = 64
FLAGS = [
    *("--num-blocks", str(SMALL_POOL), "--max-num-batched-tokens", str(CHUNK)),
    *("--step-delay-ms", "25", "--lease-s", "3"),
]
NUM_CHUNKS = 2

# What a request over both pools leaves, each once but for the prompt's chunks.
PREFILL = (
    "prefill",
    "prefill.queue",
    *["prefill.chunk"] * NUM_CHUNKS,
    "kv.offer",
    "prefill.ticket",
)
DECODE = ("decode", "decode.queue", "kv.fetch", "decode.run")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> AsyncIterator[Cluster]:
    flags = [*FLAGS, "--otlp", collector.endpoint]
    async with baton_up(tmp_path_factory.mktemp("traces"), flags=flags) as cluster:
        yield cluster


def prompt(number: int, num_chunks: int = NUM_CHUNKS) -> tuple[int, ...]:
    """Another one for each test: nothing of it is cached."""
    return prompt_of(number, num_chunks * CHUNK)


class Call:
    """One request; its trace's id is known from the start."""

    def __init__(self, channel: aio.Channel, prompt: Sequence[int], max_tokens: int) -> None:
        request = make_request(prompt, Sampling(max_tokens=max_tokens, temperature=0.0, seed=0))
        self.call = inference_grpc.InferenceServiceStub(channel).Generate(request, timeout=60)
        self.num_tokens = 0
        self.complete: inference.Complete | None = None

    async def trace_id(self) -> str:
        return str(dict(await self.call.initial_metadata())["baton-trace-id"])

    async def read(self, num_tokens: int | None = None) -> None:
        """To the end, or until there are so many tokens."""
        async for response in self.call:
            self.num_tokens += len(response.chunk.token_ids)
            if response.HasField("complete"):
                self.complete = response.complete
            if num_tokens is not None and self.num_tokens >= num_tokens:
                return


@pytest.fixture
async def channel(cluster: Cluster) -> AsyncIterator[aio.Channel]:
    async with make_public_channel(cluster.grpc) as channel:
        yield channel


def assert_one_tree(spans: Sequence[TraceSpan]) -> TraceSpan:
    """The root, from which every span can be reached. What arrived is closed: a span is sent when
    it ends."""
    assert len({span.trace_id for span in spans}) == 1
    known = {span.span_id: span for span in spans}
    assert len(known) == len(spans), "a span came twice"
    (root,) = (span for span in spans if not span.parent_id)
    assert (root.name, root.service) == ("generate", "baton-gateway")
    for span in spans:
        assert 0 < span.start_ns <= span.end_ns
        above = span
        while above.parent_id:
            assert above.parent_id in known, f"{above.name} has no parent"
            above = known[above.parent_id]
        assert above is root
    return root


def named(spans: Sequence[TraceSpan], name: str) -> list[TraceSpan]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_ns)


def has(spans: Sequence[TraceSpan], *names: str) -> bool:
    """Whether there are at least these."""
    return Counter(span.name for span in spans) >= Counter(names)


async def test_an_answer(cluster: Cluster, collector: Collector, channel: aio.Channel) -> None:
    call = Call(channel, prompt(1), 8)
    await call.read()
    assert call.complete is not None
    trace_id = call.complete.trace_id
    assert trace_id == await call.trace_id()
    expected = ("generate", "attempt", *PREFILL, *DECODE)
    spans = await collector.trace_when(trace_id, lambda spans: has(spans, *expected))
    assert sorted(span.name for span in spans) == sorted(expected)
    assert_one_tree(spans)
    assert all(span.status != "error" for span in spans)
    (attempt,) = named(spans, "attempt")
    assert attempt.attributes["baton.prefill_reason"] == "never"
    assert {span.parent_id for span in spans if span.service != "baton-gateway"} == {
        attempt.span_id
    }
    services = {span.name: span.service for span in spans}
    assert {services["prefill"], services["kv.offer"]} == {"baton-prefill"}
    assert {services["decode"], services["kv.fetch"]} == {"baton-decode"}
    (fetch,) = named(spans, "kv.fetch")
    assert fetch.attributes["baton.transport"] == "shm"
    assert fetch.attributes["baton.num_blocks"] == NUM_CHUNKS * CHUNK // 16
    _assert_the_request_in_genai_words(named(spans, "generate")[0], call.complete)
    _assert_costs(spans)
    for name, num_steps in {"prefill.chunk": 1, "decode.run": 2}.items():
        assert all(len(span.links) == num_steps for span in named(spans, name))
    assert await _baton_trace(cluster, trace_id) == {span.span_id for span in spans}
    assert await _baton_trace(cluster, call.complete.request_id) == {s.span_id for s in spans}


def _assert_the_request_in_genai_words(root: TraceSpan, complete: inference.Complete) -> None:
    num_prompt, num_output = NUM_CHUNKS * CHUNK, 8
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": "oracle",
        "gen_ai.request.max_tokens": num_output,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.id": complete.request_id,
        "gen_ai.response.model": "oracle",
        "gen_ai.response.time_to_first_chunk": complete.phases_ms.time_to_first_token / 1000,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.prompt_tokens": num_prompt,
        "gen_ai.usage.output_tokens": num_output,
        "gen_ai.usage.completion_tokens": num_output,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.latency.e2e": complete.phases_ms.total / 1000,
        "baton.request_id": complete.request_id,
    }
    assert {name: root.attributes.get(name) for name in expected} == expected
    assert "length" in str(root.attributes["gen_ai.response.finish_reasons"])


def _assert_costs(spans: Sequence[TraceSpan]) -> None:
    """The oracle has no weights, so its bytes are those of the KV alone. A chunk reads all tokens
    so far and writes its own; a decode reads all tokens and writes one."""
    token_bytes = oracle_layout(16).block_bytes // 16
    read = CHUNK + 2 * CHUNK
    moved = (read + 2 * CHUNK) * token_bytes
    chunks = [float(span.attributes["baton.bytes"]) for span in named(spans, "prefill.chunk")]
    assert sum(chunks) == moved
    (prefill,) = named(spans, "prefill")
    assert prefill.attributes["baton.bytes"] == moved
    contexts = [2 * CHUNK + index for index in range(1, 8)]
    for name in ("decode", "decode.run"):
        (span,) = named(spans, name)
        assert span.attributes["baton.bytes"] == (sum(contexts) + len(contexts)) * token_bytes
        assert span.attributes["baton.flops"] == 0
        assert span.attributes["baton.arithmetic_intensity"] == 0


async def _baton_trace(cluster: Cluster, id_: str) -> set[str]:
    """Ids of the spans that `baton trace` shows."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "trace", id_, "--json"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "XDG_RUNTIME_DIR": str(cluster.log.parent)},
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    content: dict[str, Any] = json.loads(output)
    return {span["span_id"] for span in content["spans"]}


async def test_a_cancel_while_decoding(
    cluster: Cluster, collector: Collector, channel: aio.Channel
) -> None:
    call = Call(channel, prompt(2), 500)
    await call.read(num_tokens=3)
    call.call.cancel()
    expected = ("generate", "attempt", *PREFILL, *DECODE)
    spans = await collector.trace_when(await call.trace_id(), lambda spans: has(spans, *expected))
    assert_one_tree(spans)
    errors = {span.name: span.error for span in spans if span.status == "error"}
    assert errors == {
        "generate": "cancelled", "attempt": "cancelled", "decode": "aborted",
        "decode.run": "aborted",
    }  # fmt: skip
    await cluster.until_clean()


async def test_a_cancel_in_the_prompt(
    cluster: Cluster, collector: Collector, channel: aio.Channel
) -> None:
    call = Call(channel, prompt(3, num_chunks=12), 100)
    trace_id = await call.trace_id()
    (prefill,) = cluster.of_role("prefill")
    async with asyncio.timeout(5):
        while True:
            if (await cluster.debug(prefill, "statistics"))["engine"]["num_running"]:
                break
    call.call.cancel()
    spans = await collector.trace_when(trace_id, lambda spans: has(spans, "generate", "prefill"))
    assert_one_tree(spans)
    errors = {span.name: span.error for span in spans if span.status == "error"}
    assert errors == {"generate": "cancelled", "attempt": "cancelled", "prefill": "cancelled"}
    await cluster.until_clean()


async def test_a_refusal(cluster: Cluster, collector: Collector, channel: aio.Channel) -> None:
    """Refused before anything was said to anybody: the client has no trace id but its own."""
    trace_id, parent = os.urandom(16).hex(), os.urandom(8).hex()
    metadata = (("traceparent", f"00-{trace_id}-{parent}-01"),)
    stub = inference_grpc.InferenceServiceStub(channel)
    with pytest.raises(aio.AioRpcError):
        await anext(aiter(stub.Generate(make_request([]), metadata=metadata)))
    (span,) = await collector.trace_when(trace_id, lambda spans: bool(spans))
    assert (span.name, span.parent_id, span.status) == ("generate", parent, "error")
    assert span.error == "InvalidRequest"


async def test_a_killed_decode_worker(
    cluster: Cluster, collector: Collector, channel: aio.Channel
) -> None:
    flags = ("--num-blocks", str(LARGE_POOL), "--step-delay-ms", "40", "--worker-id", "decode-x")
    async with cluster.another("decode", *flags) as victim:
        call = Call(channel, prompt(4), 100)
        trace_id = await call.trace_id()
        await call.read(num_tokens=3)
        # What it has sent by now is to find its parent later.
        await collector.trace_when(trace_id, lambda spans: has(spans, "kv.fetch"))
        victim.kill()
        await call.read()
    assert call.complete is not None and call.complete.attempts == 2 and call.num_tokens == 100
    expected = ("generate", *["attempt"] * 2, *PREFILL, *["prefill"], *DECODE, *["kv.fetch"])
    spans = await collector.trace_when(trace_id, lambda spans: has(spans, *expected))
    root = assert_one_tree(spans)
    lost, good = named(spans, "attempt")
    assert (root.status, good.status) == ("unset", "unset")
    assert (lost.status, lost.error) == ("error", "worker_lost")
    of_victim = [span for span in spans if span.instance == victim.id]
    assert {span.name for span in of_victim} == {"decode.queue", "kv.fetch"}
    assert {span.parent_id for span in of_victim} == {lost.span_id}
    (decode,) = named(spans, "decode")
    assert decode.parent_id == good.span_id
    await cluster.until_clean()


async def test_a_bug_in_a_worker(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> None:
    """Two owners fail at it, so the request ends with an error, and every span with it."""
    flags = [
        *(*FLAGS, "--otlp", collector.endpoint),
        *("--allow-failpoints", "--failpoints", "prefill.after_compute=raise"),
    ]
    folder = tmp_path_factory.mktemp("bug")
    async with (
        baton_up(folder, flags=flags, allow_tracebacks=True) as cluster,
        make_public_channel(cluster.grpc) as channel,
    ):
        call = Call(channel, prompt(5), 8)
        with pytest.raises(aio.AioRpcError) as raised:
            await call.read()
        assert isinstance(to_baton_error(raised.value), InternalError)
        expected = ("generate", *["attempt"] * 2, *["prefill"] * 2)
        spans = await collector.trace_when(
            await call.trace_id(), lambda spans: has(spans, *expected)
        )
        root = assert_one_tree(spans)
        assert (root.status, root.error) == ("error", "InternalError")
        assert [span.error for span in named(spans, "attempt")] == ["worker_lost"] * 2
        assert [span.error for span in named(spans, "prefill")] == ["interrupted"] * 2
        await cluster.until_clean()
