"""A small OTLP/gRPC receiver: the last traces of a run, by trace id or by request id.

`baton up` starts one, tells every process to export to it, answers `baton trace` from it, and
passes everything on where ``--otlp`` names a collector. The life of an export:

1. its ResourceSpans are split by trace and appended to each trace's record;
2. the oldest records go while there are too many of them, or too many bytes;
3. the request as it came is queued for the collector, or dropped where that one is too slow.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from common.listener import host_port
from common.rpc import bind, make_internal_server, make_public_channel
from common.wire import supervisor

REQUEST_ID = "baton.request_id"
_SERVICE = service.DESCRIPTOR.services_by_name["TraceService"].full_name
_FORWARD_QUEUE = 256
_FORWARD_S = 5.0

Value = str | bool | int | float


@dataclass(frozen=True, slots=True)
class SpanEvent:
    name: str
    time_ns: int
    attributes: dict[str, Value]


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One span as plain data; ids are hex, times wall-clock nanoseconds. ``parent_id`` is empty for
    a root, ``status`` is unset | ok | error and ``error`` its text."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    instance: str
    start_ns: int
    end_ns: int
    status: str
    error: str
    attributes: dict[str, Value]
    events: tuple[SpanEvent, ...] = ()
    # (trace id, span id) of each linked span.
    links: tuple[tuple[str, str], ...] = ()

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


@dataclass(frozen=True, slots=True)
class ReceiverStatistics:
    num_traces: int
    num_bytes: int
    num_evicted: int
    num_forwarded: int
    num_not_forwarded: int


@dataclass(slots=True)
class _Trace:
    parts: list[bytes] = field(default_factory=list)
    request_ids: set[str] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.parts))


class TraceStore:
    """The last traces, bounded by number and by bytes. One thread."""

    def __init__(self, max_traces: int, max_bytes: int) -> None:
        self._max_traces = max_traces
        self._max_bytes = max_bytes
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self._by_request: dict[str, str] = {}
        self._num_bytes = 0
        self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._traces)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def add(self, resource_spans: ResourceSpans) -> None:
        for trace_id, part in _by_trace(resource_spans).items():
            trace = self._traces.setdefault(trace_id, _Trace())
            self._traces.move_to_end(trace_id)
            data = part.SerializeToString()
            trace.parts.append(data)
            self._num_bytes += len(data)
            for request_id in _request_ids(part):
                trace.request_ids.add(request_id)
                self._by_request[request_id] = trace_id
        while len(self._traces) > self._max_traces or self._num_bytes > self._max_bytes:
            self._evict_oldest()

    def find(self, id_: str) -> supervisor.GetTraceResponse | None:
        """The trace with this trace id or request id; `spans_of` reads its ``resource_spans``."""
        trace_id = self._by_request.get(id_, id_)
        trace = self._traces.get(trace_id)
        if trace is None:
            return None
        return supervisor.GetTraceResponse(trace_id=trace_id, resource_spans=trace.parts)

    def _evict_oldest(self) -> None:
        trace_id, trace = self._traces.popitem(last=False)
        self._num_bytes -= trace.num_bytes
        self.num_evicted += 1
        for request_id in trace.request_ids:
            if self._by_request.get(request_id) == trace_id:
                del self._by_request[request_id]


class OtlpReceiver:
    """The receiver's server, for who has ``token``. ``forward_to`` is host:port of another
    OTLP/gRPC collector."""

    def __init__(
        self,
        token: str,
        max_traces: int = 1000,
        max_bytes: int = 64 << 20,
        forward_to: str | None = None,
    ) -> None:
        self._store = TraceStore(max_traces, max_bytes)
        self._max_traces = max_traces
        self._forward_to = forward_to
        self._queue: asyncio.Queue[service.ExportTraceServiceRequest] = asyncio.Queue(
            _FORWARD_QUEUE
        )
        self._forwarder: asyncio.Task[None] | None = None
        self._num_forwarded = 0
        self._num_not_forwarded = 0
        self._server = make_internal_server(token)
        export = grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=service.ExportTraceServiceRequest.FromString,
            response_serializer=service.ExportTraceServiceResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(_SERVICE, {"Export": export})
        self._server.add_generic_rpc_handlers((handler,))

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Returns the endpoint to export to."""
        actual = bind(self._server, host, port)
        await self._server.start()
        if self._forward_to is not None:
            self._forwarder = asyncio.create_task(self._forward(self._forward_to))
        return host_port(host, actual)

    def find(self, id_: str) -> supervisor.GetTraceResponse | None:
        return self._store.find(id_)

    @property
    def kept(self) -> str:
        """Which traces there are, in words."""
        return f"the last {self._max_traces} are kept, there are {len(self._store)}"

    async def stop(self) -> None:
        await self._server.stop(0.5)
        if self._forwarder is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._queue.join()
            self._forwarder.cancel()
            await asyncio.gather(self._forwarder, return_exceptions=True)

    def statistics(self) -> ReceiverStatistics:
        return ReceiverStatistics(
            num_traces=len(self._store),
            num_bytes=self._store.num_bytes,
            num_evicted=self._store.num_evicted,
            num_forwarded=self._num_forwarded,
            num_not_forwarded=self._num_not_forwarded,
        )

    async def _export(
        self, request: service.ExportTraceServiceRequest, context: Any
    ) -> service.ExportTraceServiceResponse:
        for resource_spans in request.resource_spans:
            self._store.add(resource_spans)
        if self._forwarder is not None:
            if self._queue.full():
                self._num_not_forwarded += 1
            else:
                self._queue.put_nowait(request)
        return service.ExportTraceServiceResponse()

    async def _forward(self, target: str) -> None:
        async with make_public_channel(target.removeprefix("http://")) as channel:
            export = channel.unary_unary(
                f"/{_SERVICE}/Export",
                request_serializer=service.ExportTraceServiceRequest.SerializeToString,
                response_deserializer=service.ExportTraceServiceResponse.FromString,
            )
            while True:
                request = await self._queue.get()
                try:
                    await export(request, timeout=_FORWARD_S)
                    self._num_forwarded += 1
                except aio.AioRpcError:
                    self._num_not_forwarded += 1
                finally:
                    self._queue.task_done()


def spans_of(parts: Iterable[bytes]) -> list[TraceSpan]:
    """The spans of serialised ResourceSpans, by start time."""
    spans = []
    for part in parts:
        resource_spans = ResourceSpans.FromString(part)
        resource = _values(resource_spans.resource.attributes)
        name = str(resource.get("service.name", ""))
        instance = str(resource.get("service.instance.id", ""))
        spans += [_plain(span, name, instance) for span in _spans(resource_spans)]
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))


def _plain(span: Span, service_name: str, instance: str) -> TraceSpan:
    status = {Status.STATUS_CODE_OK: "ok", Status.STATUS_CODE_ERROR: "error"}
    return TraceSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        service=service_name,
        instance=instance,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=status.get(span.status.code, "unset"),
        error=span.status.message,
        attributes=_values(span.attributes),
        events=tuple(
            SpanEvent(event.name, event.time_unix_nano, _values(event.attributes))
            for event in span.events
        ),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )


def _spans(resource_spans: ResourceSpans) -> Iterator[Span]:
    for scope_spans in resource_spans.scope_spans:
        yield from scope_spans.spans


def _by_trace(resource_spans: ResourceSpans) -> dict[str, ResourceSpans]:
    parts: dict[str, ResourceSpans] = {}
    for span in _spans(resource_spans):
        trace_id = span.trace_id.hex()
        if trace_id not in parts:
            parts[trace_id] = ResourceSpans(
                resource=resource_spans.resource, scope_spans=[ScopeSpans()]
            )
        parts[trace_id].scope_spans[0].spans.append(span)
    return parts


def _request_ids(resource_spans: ResourceSpans) -> set[str]:
    return {
        attribute.value.string_value
        for span in _spans(resource_spans)
        for attribute in span.attributes
        if attribute.key == REQUEST_ID
    }


def _values(attributes: Iterable[KeyValue]) -> dict[str, Value]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    if kind in ("string_value", "bool_value", "int_value", "double_value"):
        plain: Value = getattr(value, kind)
        return plain
    if kind == "array_value":
        return ", ".join(str(_value(item)) for item in value.array_value.values)
    return str(value).strip()
