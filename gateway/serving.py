"""What serving a request means, whoever asked: gRPC and HTTP differ in how they show it.

1. the tenant has a place left among its concurrent requests;
2. a span and a log record are open from here to the end;
3. the messages are parsed, each into one Request a choice;
4. all choices run at once, and their events come in one stream; the first error ends them all.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from opentelemetry.trace import SpanKind

from common.errors import InvalidRequest, Overloaded
from common.telemetry import Carrier, Span, Telemetry
from common.wire import inference
from gateway.admission import Bounds
from gateway.api_keys import ApiKeys
from gateway.choices import merge
from gateway.parser import RequestParser
from gateway.pipeline import Pipeline
from gateway.request import Completed, OutputEvent, Request
from gateway.request_log import Record, recorded
from gateway.spans import begin_request, end_request

# Choices of one request, over all of its prompts.
MAX_CHOICES = 1024
# Log-probabilities of prompt tokens in one answer, which is built at once.
MAX_PROMPT_LOGPROBS = 1 << 18


@dataclass(frozen=True, slots=True)
class Exchange:
    """``events`` are (index into ``requests``, event)."""

    requests: Sequence[Request]
    span: Span
    events: AsyncGenerator[tuple[int, OutputEvent], None]

    @property
    def shown_id(self) -> str:
        """The client's own id, or ours."""
        return self.requests[0].client_request_id or self.requests[0].request_id

    @property
    def headers(self) -> dict[str, str]:
        """What a client is told before anything else."""
        own = {"baton-request-id": self.requests[0].request_id}
        return {**own, "baton-trace-id": self.span.trace_id} if self.span.trace_id else own


@dataclass(slots=True)
class Service:
    parser: RequestParser
    pipeline: Pipeline
    telemetry: Telemetry
    keys: ApiKeys
    bounds: Bounds
    num_open: int = 0
    _closed: asyncio.Event = field(default_factory=asyncio.Event)
    _num_of_tenant: Counter[str] = field(default_factory=Counter)

    @asynccontextmanager
    async def serve(
        self,
        messages: Sequence[inference.GenerateRequest],
        tenant: str,
        parent: Carrier,
        operation: str,
        stream: bool = True,
        time_remaining_s: float | None = None,
    ) -> AsyncIterator[Exchange]:
        """``operation``: of gateway/spans.py. Raises InvalidRequest, Overloaded and Unavailable;
        ``events`` any BatonError."""
        model = self.parser.facts().name
        with (
            self._opened(),
            self._place(tenant),
            self.telemetry.span("generate", parent, kind=SpanKind.SERVER) as span,
            recorded(span.trace_id) as record,
        ):
            requests = await self._parse(messages, time_remaining_s, tenant)
            record.request_id = requests[0].request_id
            record.num_prompt_tokens = sum(len(r.prompt_ids) for r in requests if r.choice == 0)
            begin_request(span, operation, model, requests, stream)
            streams = [self.pipeline.generate(request, span.carrier) for request in requests]
            async with aclosing(_noted(merge(streams), record)) as events:
                exchange = Exchange(requests, span, events)
                yield exchange
            end_request(span, model, exchange.shown_id, record.ends)

    async def idle(self) -> None:
        """Until the last event of every answer was taken."""
        while self.num_open:
            self._closed.clear()
            await self._closed.wait()

    @contextmanager
    def _opened(self) -> Iterator[None]:
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1
            self._closed.set()

    async def _parse(
        self,
        messages: Sequence[inference.GenerateRequest],
        time_remaining_s: float | None,
        tenant: str,
    ) -> list[Request]:
        limit = min(MAX_CHOICES, self.bounds.tenant_requests)
        num_choices = sum(max(1, message.n) for message in messages)
        if num_choices > limit and len(messages) > 1:
            raise InvalidRequest("n", f"{num_choices} choices of all prompts, at most {limit}")
        requests: list[Request] = []
        for message in messages:
            requests += await self.parser.parse(message, time_remaining_s, tenant)
        check_size(requests, self.bounds.tenant_tokens)
        return requests

    @contextmanager
    def _place(self, tenant: str) -> Iterator[None]:
        limits = self.keys.limits.get(tenant)
        limit = None if limits is None else limits.max_concurrent_requests
        if limit is not None and self._num_of_tenant[tenant] >= limit:
            raise Overloaded(f"this key may have {limit} requests at the same time")
        self._num_of_tenant[tenant] += 1
        try:
            yield
        finally:
            self._num_of_tenant[tenant] -= 1
            if not self._num_of_tenant[tenant]:
                del self._num_of_tenant[tenant]


def check_size(requests: Sequence[Request], max_tokens: int) -> None:
    """Refuses what could never be let in, and an answer too large to be built at once."""
    num_tokens = sum(len(request.prompt_ids) for request in requests)
    if num_tokens > max_tokens and len(requests) > 1:
        raise InvalidRequest(
            "prompt", f"{num_tokens} tokens over all choices, at most {max_tokens}"
        )
    num_logprobs = sum(
        len(request.prompt_ids) * (1 + request.params.prompt_logprobs)
        for request in requests
        if request.params.prompt_logprobs is not None
    )
    if num_logprobs > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            "prompt_logprobs",
            f"{num_logprobs} values over all choices, at most {MAX_PROMPT_LOGPROBS}; "
            "send shorter or fewer prompts, or n = 1",
        )


async def _noted(
    events: AsyncGenerator[tuple[int, OutputEvent], None], record: Record
) -> AsyncGenerator[tuple[int, OutputEvent], None]:
    async with aclosing(events):
        async for index, event in events:
            if isinstance(event, Completed):
                record.ends.append(event)
            else:
                record.num_output_tokens += len(event.token_ids)
            yield index, event
