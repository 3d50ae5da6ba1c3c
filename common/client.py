"""A typed gRPC client for Baton, asynchronous (`BatonClient`) and not (`SyncBatonClient`).

>>> async with BatonClient("127.0.0.1:50051") as client:
...     async for chunk in client.generate("Once upon a time", Sampling(max_tokens=32)):
...         print(chunk.text, end="")
...     print(chunk.complete.usage)

The last chunk of each choice has ``complete`` set (and may still bring text). Failures raise the
errors of common/errors.py. A request that the service cannot take (Unavailable) is tried again, but
only while nothing of the answer has arrived. Leaving the loop early cancels the request.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from common.errors import BatonError, DeadlineExceeded, InvalidRequest, Unavailable
from common.rpc import (
    PUBLIC_CHANNEL_OPTIONS,
    make_public_channel,
    public_credentials,
    to_baton_error,
)
from common.status import is_lost_connection
from common.types import FinishReason, PhasesMs, TokenId, TokenLogprobs, Usage
from common.wire import (
    finish_reason_from_proto,
    inference,
    inference_grpc,
    logprobs_from_proto,
    phases_from_proto,
    usage_from_proto,
)

_INFO_TIMEOUT_S = 10.0
_MAX_TRIES = 4
# How the text of a call begins that found nobody.
_NOT_CONNECTED = ("failed to connect to all addresses", "DNS resolution failed")


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as (role, content), put into the model's own chat template."""

    messages: tuple[tuple[str, str], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False


Prompt = str | Sequence[TokenId] | Chat


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. None: the server's default, which is the model's own."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[TokenId] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[TokenId, float] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """How one choice ended."""

    finish_reason: FinishReason
    matched_token_id: TokenId | None
    matched_string: str | None
    usage: Usage
    phases_ms: PhasesMs
    request_id: str
    trace_id: str
    attempts: int
    seed: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What came since the last chunk of this choice. ``index`` is the first id's output index."""

    choice: int
    text: str
    index: int = 0
    token_ids: tuple[TokenId, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    complete: Completion | None = None


class BatonClient:
    """One connection to a gateway, ``target`` being host:port. ``timeout_s`` bounds a whole
    request, tries included; the server has a limit of its own. ``api_key`` where the gateway wants
    one; ``tls_ca_file``, PEM, for one that speaks TLS."""

    def __init__(
        self,
        target: str,
        timeout_s: float | None = None,
        *,
        api_key: str = "",
        tls_ca_file: Path | None = None,
    ) -> None:
        self._target = target
        self._metadata = _metadata(api_key)
        self._channel = make_public_channel(target, tls_ca_file)
        self._stub = inference_grpc.InferenceServiceStub(self._channel)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        request_id: str = "",
        cache_salt: str = "",
        priority: int = 0,
        speculate: bool = True,
    ) -> AsyncIterator[Chunk]:
        request = make_request(prompt, sampling, n, request_id, cache_salt, priority, speculate)
        tries = _Tries(self._timeout_s, asyncio.get_running_loop().time())
        while True:
            now_s = asyncio.get_running_loop().time()
            call = self._stub.Generate(
                request, timeout=tries.left_s(now_s), metadata=self._metadata
            )
            started = False
            num_ended = 0
            try:
                async for response in call:
                    started = True
                    num_ended += response.HasField("complete")
                    yield _chunk(response)
                return
            except grpc.RpcError as error:
                if num_ended == n and is_lost_connection(error):
                    return  # all was said
                delay_s = tries.delay_s(_failure(error, self._target), started)
            finally:
                call.cancel()
            await asyncio.sleep(delay_s)

    async def model_info(self) -> inference.GetModelInfoResponse:
        try:
            return await self._stub.GetModelInfo(
                inference.GetModelInfoRequest(), timeout=_INFO_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise _failure(error, self._target) from None

    async def list_workers(self) -> inference.ListWorkersResponse:
        try:
            return await self._stub.ListWorkers(
                inference.ListWorkersRequest(), timeout=_INFO_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise _failure(error, self._target) from None


class SyncBatonClient:
    """As `BatonClient`, for programs without an event loop."""

    def __init__(
        self,
        target: str,
        timeout_s: float | None = None,
        *,
        api_key: str = "",
        tls_ca_file: Path | None = None,
    ) -> None:
        self._target = target
        self._metadata = _metadata(api_key)
        if tls_ca_file is None:
            self._channel = grpc.insecure_channel(target, options=PUBLIC_CHANNEL_OPTIONS)
        else:
            credentials = public_credentials(tls_ca_file)
            self._channel = grpc.secure_channel(target, credentials, PUBLIC_CHANNEL_OPTIONS)
        self._stub = inference_grpc.InferenceServiceStub(self._channel)
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        request_id: str = "",
        cache_salt: str = "",
        priority: int = 0,
        speculate: bool = True,
    ) -> Iterator[Chunk]:
        request = make_request(prompt, sampling, n, request_id, cache_salt, priority, speculate)
        tries = _Tries(self._timeout_s, time.monotonic())
        while True:
            call = self._stub.Generate(
                request, timeout=tries.left_s(time.monotonic()), metadata=self._metadata
            )
            started = False
            num_ended = 0
            try:
                for response in call:
                    started = True
                    num_ended += response.HasField("complete")
                    yield _chunk(response)
                return
            except grpc.RpcError as error:
                if num_ended == n and is_lost_connection(error):
                    return  # all was said
                delay_s = tries.delay_s(_failure(error, self._target), started)
            finally:
                call.cancel()
            time.sleep(delay_s)

    def model_info(self) -> inference.GetModelInfoResponse:
        try:
            return self._stub.GetModelInfo(
                inference.GetModelInfoRequest(), timeout=_INFO_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise _failure(error, self._target) from None

    def list_workers(self) -> inference.ListWorkersResponse:
        try:
            return self._stub.ListWorkers(
                inference.ListWorkersRequest(), timeout=_INFO_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise _failure(error, self._target) from None


def _metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _failure(error: grpc.RpcError, target: str) -> BatonError:
    """What a call raised; in our words where nobody answers there."""
    details: str = error.details() or ""
    if details.startswith(_NOT_CONNECTED):
        return Unavailable(f"no gateway answers at {target}; is `baton up` running?")
    return to_baton_error(error)


class _Tries:
    """When to try again, and until when."""

    def __init__(self, timeout_s: float | None, now_s: float) -> None:
        self._deadline_s = None if timeout_s is None else now_s + timeout_s
        self._num_tries = 0

    def left_s(self, now_s: float) -> float | None:
        """Seconds for the next try. Raises DeadlineExceeded when none is left."""
        self._num_tries += 1
        if self._deadline_s is None:
            return None
        if now_s >= self._deadline_s:
            raise DeadlineExceeded("the request's time is over")
        return self._deadline_s - now_s

    def delay_s(self, error: BatonError, started: bool) -> float:
        """Seconds to wait before the next try; raises ``error`` where there is to be none."""
        if started or not isinstance(error, Unavailable) or self._num_tries >= _MAX_TRIES:
            raise error from None
        return error.retry_after_s * random.uniform(0.5, 1.0)


def make_request(
    prompt: Prompt,
    sampling: Sampling | None = None,
    n: int = 1,
    request_id: str = "",
    cache_salt: str = "",
    priority: int = 0,
    speculate: bool = True,
) -> inference.GenerateRequest:
    """The message for these arguments. Raises InvalidRequest for values that it cannot hold."""
    try:
        return inference.GenerateRequest(
            request_id=request_id,
            sampling=_sampling_to_proto(sampling or Sampling()),
            cache_salt=cache_salt,
            priority=priority,
            n=n,
            speculation=(
                inference.SPECULATION_UNSPECIFIED if speculate else inference.SPECULATION_OFF
            ),
            **_input(prompt),
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequest("request", str(error)) from None


def _input(prompt: Prompt) -> dict[str, Any]:
    """The one input field that is set."""
    if isinstance(prompt, str):
        return {"text": prompt}
    if not isinstance(prompt, Chat):
        return {"token_ids": inference.TokenIds(ids=prompt)}
    chat = inference.ChatInput(
        messages=[inference.ChatMessage(role=r, content=c) for r, c in prompt.messages],
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
    )
    return {"chat": chat}


def _sampling_to_proto(sampling: Sampling) -> inference.SamplingParams:
    given = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    return inference.SamplingParams(**{k: v for k, v in given.items() if v is not None})


def _chunk(response: inference.GenerateResponse) -> Chunk:
    if response.HasField("complete"):
        complete = response.complete
        return Chunk(response.choice, complete.text, complete=_completion(complete))
    chunk = response.chunk
    return Chunk(
        choice=response.choice,
        text=chunk.text,
        index=chunk.index,
        token_ids=tuple(chunk.token_ids),
        logprobs=logprobs_from_proto(chunk.logprobs),
        prompt_logprobs=logprobs_from_proto(chunk.prompt_logprobs),
    )


def _completion(message: inference.Complete) -> Completion:
    matched = message.WhichOneof("matched_stop")
    return Completion(
        finish_reason=finish_reason_from_proto(message.finish_reason) or FinishReason.ERROR,
        matched_token_id=message.matched_token_id if matched == "matched_token_id" else None,
        matched_string=message.matched_string if matched == "matched_string" else None,
        usage=usage_from_proto(message.usage),
        phases_ms=phases_from_proto(message.phases_ms),
        request_id=message.request_id,
        trace_id=message.trace_id,
        attempts=message.attempts,
        seed=message.seed,
    )
