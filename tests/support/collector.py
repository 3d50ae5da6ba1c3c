"""A collector of traces, as an operator would run one: OTLP over gRPC, in threads of its own."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

from cli.otlp import TraceSpan, spans_of

_SERVICE = service.DESCRIPTOR.services_by_name["TraceService"].full_name


class Collector:
    """``endpoint`` is what ``--otlp`` takes."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._lock = threading.Lock()
        self._spans: dict[str, list[TraceSpan]] = defaultdict(list)

    def export(
        self, request: service.ExportTraceServiceRequest, context: Any
    ) -> service.ExportTraceServiceResponse:
        spans = spans_of(part.SerializeToString() for part in request.resource_spans)
        with self._lock:
            for span in spans:
                self._spans[span.trace_id].append(span)
        return service.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[TraceSpan]:
        with self._lock:
            return list(self._spans[trace_id])

    async def trace_when(
        self, trace_id: str, condition: Callable[[list[TraceSpan]], bool]
    ) -> list[TraceSpan]:
        """The spans of a trace once they meet the condition: exports come late, and in parts."""
        for _ in range(200):
            if condition(spans := self.trace(trace_id)):
                return spans
            await asyncio.sleep(0.05)
        raise AssertionError([(span.name, span.error) for span in self.trace(trace_id)])


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    export = grpc.unary_unary_rpc_method_handler(
        collector.export,
        request_deserializer=service.ExportTraceServiceRequest.FromString,
        response_serializer=service.ExportTraceServiceResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(_SERVICE, {"Export": export})
    server.add_generic_rpc_handlers((handler,))
    collector.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
