"""Both clients against a real gRPC server that plays the gateway."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import pytest

from common import errors
from common.client import BatonClient, Chat, Chunk, Sampling, SyncBatonClient, make_request
from common.rpc import bind, make_public_server
from common.types import FinishReason, TokenLogprobs, Usage
from common.wire import inference, inference_grpc


class Gateway(inference_grpc.InferenceServiceServicer):
    """Answers two tokens a choice; fails the first ``num_failures`` tries, after
    ``num_chunks_before`` chunks, with ``error``."""

    def __init__(self) -> None:
        self.num_failures = 0
        self.num_chunks_before = 0
        self.error: errors.BatonError = errors.Unavailable("draining", retry_after_s=0.05)
        self.requests: list[inference.GenerateRequest] = []
        self.hold = False
        # What comes between the last message and the status.
        self.after_all: Callable[[], Awaitable[None]] | None = None
        self.cancelled = threading.Event()

    async def Generate(
        self, request: inference.GenerateRequest, context: Any
    ) -> AsyncIterator[inference.GenerateResponse]:
        self.requests.append(request)
        fails = len(self.requests) <= self.num_failures
        if fails and not self.num_chunks_before:
            raise self.error
        top = [inference.TopLogprob(token_id=7, logprob=-0.5)]
        logprobs = [inference.TokenLogprobs(token_id=7, logprob=-0.5, rank=1, top=top)]
        chunk = inference.Chunk(index=0, token_ids=[7], text="a", logprobs=logprobs)
        yield inference.GenerateResponse(chunk=chunk)
        if fails:
            raise self.error
        try:
            if self.hold:
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        complete = inference.Complete(
            finish_reason=inference.FINISH_REASON_STOP,
            matched_string="!",
            usage=inference.Usage(prompt_tokens=3, output_tokens=1),
            request_id=request.request_id,
            attempts=1,
            seed=2**64 - 1,
            text="b",
        )
        yield inference.GenerateResponse(complete=complete)
        if self.after_all is not None:
            await self.after_all()

    async def GetModelInfo(
        self, request: inference.GetModelInfoRequest, context: Any
    ) -> inference.GetModelInfoResponse:
        return inference.GetModelInfoResponse(model="m", vocab_size=512)

    async def ListWorkers(
        self, request: inference.ListWorkersRequest, context: Any
    ) -> inference.ListWorkersResponse:
        raise errors.PermissionDenied("not yours")


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[str]:
    server = make_public_server(1 << 20)
    inference_grpc.add_InferenceServiceServicer_to_server(gateway, server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def generate_async(target: str, timeout_s: float | None = None) -> list[Chunk]:
    async with BatonClient(target, timeout_s) as client:
        return [chunk async for chunk in client.generate("x", Sampling(max_tokens=2))]


async def generate_sync(target: str, timeout_s: float | None = None) -> list[Chunk]:
    def run() -> list[Chunk]:
        with SyncBatonClient(target, timeout_s) as client:
            return list(client.generate("x", Sampling(max_tokens=2)))

    return await asyncio.to_thread(run)


both = pytest.mark.parametrize("generate", [generate_async, generate_sync])
Generate = Callable[..., Any]


@both
async def test_chunks_and_completion(generate: Generate) -> None:
    async with serving(Gateway()) as target:
        first, last = await generate(target)
    assert first == Chunk(
        choice=0,
        text="a",
        index=0,
        token_ids=(7,),
        logprobs=(TokenLogprobs(7, -0.5, 1, ((7, -0.5),)),),
    )
    assert last.text == "b" and last.token_ids == ()
    assert last.complete is not None
    assert last.complete.finish_reason is FinishReason.STOP
    assert last.complete.matched_string == "!" and last.complete.matched_token_id is None
    assert last.complete.usage == Usage(prompt_tokens=3, output_tokens=1)
    assert last.complete.seed == 2**64 - 1


@both
async def test_unavailable_is_tried_again_before_the_first_token(generate: Generate) -> None:
    gateway = Gateway()
    gateway.num_failures = 2
    async with serving(gateway) as target:
        chunks = await generate(target)
    assert "".join(chunk.text for chunk in chunks) == "ab"
    assert len(gateway.requests) == 3


@both
async def test_not_for_ever(generate: Generate) -> None:
    gateway = Gateway()
    gateway.num_failures = 100
    async with serving(gateway) as target:
        with pytest.raises(errors.Unavailable, match="draining"):
            await generate(target)
    assert len(gateway.requests) == 4


@both
async def test_never_after_the_first_token(generate: Generate) -> None:
    gateway = Gateway()
    gateway.num_failures, gateway.num_chunks_before = 1, 1
    async with serving(gateway) as target:
        with pytest.raises(errors.Unavailable):
            await generate(target)
    assert len(gateway.requests) == 1


@asynccontextmanager
async def wire_to(target: str) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """An address from which everything goes to ``target``, and a function that tears its
    connections."""
    host, _, port = target.rpartition(":")
    ends: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection(host, int(port))
        ends.extend((writer, behind_writer))
        await asyncio.gather(copy(reader, behind_writer), copy(behind_reader, writer))

    def tear() -> None:
        for end in ends:
            end.transport.abort()

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", tear
        tear()


@both
async def test_an_answer_is_whole_without_its_status(generate: Generate) -> None:
    """A gateway that is killed between the two."""
    gateway = Gateway()
    async with serving(gateway) as target, wire_to(target) as (wire, tear):

        async def after_all() -> None:
            await asyncio.sleep(0.2)  # until the client has what was sent
            tear()
            await asyncio.sleep(60)

        gateway.after_all = after_all
        chunks = await generate(wire)
    assert "".join(chunk.text for chunk in chunks) == "ab"
    assert len(gateway.requests) == 1


@both
async def test_an_error_after_the_answer_is_raised(generate: Generate) -> None:
    gateway = Gateway()
    async with serving(gateway) as target:

        async def after_all() -> None:
            raise errors.Unavailable("draining")

        gateway.after_all = after_all
        with pytest.raises(errors.Unavailable, match="draining"):
            await generate(target)


@both
async def test_an_answer_that_is_cut_off_is_an_error(generate: Generate) -> None:
    gateway = Gateway()
    gateway.hold = True
    async with serving(gateway) as target, wire_to(target) as (wire, tear):
        asyncio.get_running_loop().call_later(0.5, tear)
        with pytest.raises(errors.Unavailable):
            await generate(wire)


@both
async def test_other_errors_are_raised_at_once(generate: Generate) -> None:
    gateway = Gateway()
    gateway.num_failures = 1
    gateway.error = errors.InvalidRequest("sampling.top_p", "2.0 is above 1")
    async with serving(gateway) as target:
        with pytest.raises(errors.InvalidRequest) as caught:
            await generate(target)
    assert caught.value.field == "sampling.top_p" and len(gateway.requests) == 1


@both
async def test_the_timeout_bounds_all_tries(generate: Generate) -> None:
    gateway = Gateway()
    gateway.hold = True
    async with serving(gateway) as target:
        with pytest.raises(errors.DeadlineExceeded):
            await generate(target, 0.3)
    gateway.num_failures, gateway.error = 100, errors.Unavailable("no", retry_after_s=0.6)
    async with serving(gateway) as target:
        with pytest.raises(errors.DeadlineExceeded):
            await generate(target, 0.2)


async def test_leaving_early_cancels() -> None:
    gateway = Gateway()
    gateway.hold = True
    async with serving(gateway) as target:
        async with BatonClient(target) as client, aclosing(client.generate("x")) as chunks:
            async for _ in chunks:
                break
        assert await asyncio.to_thread(gateway.cancelled.wait, 2)
        gateway.cancelled.clear()

        def leave() -> None:
            with SyncBatonClient(target) as client:
                for _ in client.generate("x"):
                    break

        await asyncio.to_thread(leave)
        assert await asyncio.to_thread(gateway.cancelled.wait, 2)


async def test_cancelling_the_task_cancels() -> None:
    gateway = Gateway()
    gateway.hold = True
    async with serving(gateway) as target:
        task = asyncio.create_task(generate_async(target))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(gateway.cancelled.wait, 2)


async def test_info_calls() -> None:
    async with serving(Gateway()) as target:
        async with BatonClient(target) as client:
            assert (await client.model_info()).vocab_size == 512
            with pytest.raises(errors.PermissionDenied):
                await client.list_workers()

        def sync_calls() -> int:
            with SyncBatonClient(target) as client:
                with pytest.raises(errors.PermissionDenied):
                    client.list_workers()
                return client.model_info().vocab_size

        assert await asyncio.to_thread(sync_calls) == 512


def test_requests_say_only_what_was_given() -> None:
    request = make_request([1, 2, 3], Sampling(temperature=0.0, stop=["!"], seed=0), n=2)
    assert list(request.token_ids.ids) == [1, 2, 3] and request.n == 2
    assert request.sampling.HasField("temperature") and request.sampling.HasField("seed")
    assert not request.sampling.HasField("top_p") and not request.sampling.HasField("max_tokens")
    chat = make_request(Chat((("user", "hi"),), continue_final_message=True)).chat
    assert [(m.role, m.content) for m in chat.messages] == [("user", "hi")]
    assert chat.add_generation_prompt and chat.continue_final_message
    assert make_request("text").text == "text"


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        ([-1], Sampling()),
        ([2**32], Sampling()),
        ("\ud800", Sampling()),
        ("x", Sampling(max_tokens=-1)),
        ("x", Sampling(seed=2**64)),
        ("x", Sampling(logit_bias={-1: 1.0})),
    ],
)
def test_values_that_no_message_can_hold(prompt: Any, sampling: Sampling) -> None:
    with pytest.raises(errors.InvalidRequest):
        make_request(prompt, sampling)
