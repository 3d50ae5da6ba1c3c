"""OpenTelemetry spans of one process, exported over OTLP/gRPC, or nothing at all.

A parent is named by its *carrier*, the W3C headers ``{"traceparent": ...}`` as they travel in NATS
headers and gRPC metadata; no span is ever "current", so nothing depends on which task runs. All
times are of one monotonic clock (a loop's or an engine's), turned into wall time by an offset
taken once, so a clock that jumps bends no span. Without an endpoint, or where the environment says
``OTEL_SDK_DISABLED=true``, every call is a cheap no-op and carriers pass through; the SDK itself
reads ``OTEL_TRACES_SAMPLER``. Prompts, outputs and lease secrets are never attributes.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_SDK_DISABLED
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]
Carrier = Mapping[str, str]

_CARRIER_KEYS = ("traceparent", "tracestate")
_PROPAGATOR = TraceContextTextMapPropagator()
_EXPORT_DELAY_MS = 500
_EXPORT_TIMEOUT_S = 2
_SHUTDOWN_S = 2.0


class Span:
    """One span under way. ``carrier`` makes other spans its children; ``trace_id`` is 32 hex
    digits, empty when nothing is recorded."""

    def __init__(
        self, span: trace.Span | None, carrier: Carrier, wall_ns: Callable[[float], int]
    ) -> None:
        self._span = span
        self._wall_ns = wall_ns
        self.carrier = carrier

    @property
    def trace_id(self) -> str:
        return trace_id_of(self.carrier)

    def set(self, name: str, value: AttributeValue) -> None:
        if self._span is not None:
            self._span.set_attribute(name, value)

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        if self._span is not None:
            self._span.add_event(name, attributes)

    def end(self, error: str | None = None, end_s: float | None = None) -> None:
        """Ends it, once; with ``error`` (a short type such as ``worker_lost``) as failed."""
        if self._span is None:
            return
        if error is not None:
            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(self._wall_ns(end_s) if end_s is not None else None)
        self._span = None


class Telemetry:
    """Makes spans for one process; ``clock`` is that of all times given in seconds.

    >>> with telemetry.span("attempt", parent=request.carrier) as span:
    ...     await bus.publish_job(data, message_id, headers=span.carrier)
    """

    def __init__(
        self,
        service_name: str,
        instance_id: str,
        otlp_endpoint: str | None,
        clock: Callable[[], float] = time.monotonic,
        otlp_token: str = "",
    ) -> None:
        self._clock = clock
        self._offset_ns = time.time_ns() - round(clock() * 1e9)
        self._provider: TracerProvider | None = None
        if otlp_endpoint is None or _is_disabled():
            return
        resource = Resource.create(
            {
                "service.name": service_name,
                "service.instance.id": instance_id,
                "service.namespace": "baton",
            }
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(
            endpoint=otlp_endpoint,
            insecure=not otlp_endpoint.startswith("https://"),
            headers=(("authorization", f"Bearer {otlp_token}"),) if otlp_token else None,
            timeout=_EXPORT_TIMEOUT_S,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter, max_queue_size=16384, schedule_delay_millis=_EXPORT_DELAY_MS
            )
        )
        self._tracer = self._provider.get_tracer("baton")
        # A collector that is down is said once by the exporter's own error, not at each retry.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)

    @property
    def enabled(self) -> bool:
        return self._provider is not None

    def start_span(
        self,
        name: str,
        parent: Carrier | None = None,
        attributes: Attributes | None = None,
        links: Iterable[Carrier] = (),
        start_s: float | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """A span that its owner ends. Without a parent it is the root of a new trace."""
        if self._provider is None:
            return Span(None, parent or {}, self._wall_ns)
        span = self._tracer.start_span(
            name,
            context=_PROPAGATOR.extract(parent or {}),
            kind=kind,
            attributes=attributes,
            links=[link for carrier in links if (link := _link(carrier)) is not None],
            start_time=self._wall_ns(self._clock() if start_s is None else start_s),
        )
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
        return Span(span, carrier, self._wall_ns)

    @contextmanager
    def span(
        self,
        name: str,
        parent: Carrier | None = None,
        attributes: Attributes | None = None,
        links: Iterable[Carrier] = (),
        start_s: float | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Iterator[Span]:
        """A span around a block: failed with the error's type when the block raises, as
        ``cancelled`` when its task is cancelled or its generator closed."""
        span = self.start_span(name, parent, attributes, links, start_s, kind)
        try:
            yield span
        except (asyncio.CancelledError, GeneratorExit):
            span.end("cancelled", self._clock())
            raise
        except BaseException as error:
            span.end(type(error).__name__, self._clock())
            raise
        finally:
            span.end(end_s=self._clock())

    def record_span(
        self,
        name: str,
        start_s: float,
        end_s: float,
        parent: Carrier | None = None,
        attributes: Attributes | None = None,
        links: Iterable[Carrier] = (),
        error: str | None = None,
    ) -> Carrier:
        """A span that is already over. Returns its carrier, for children and links."""
        span = self.start_span(name, parent, attributes, links, start_s)
        span.end(error, end_s)
        return span.carrier

    async def shutdown(self) -> None:
        """Sends what is left, for at most 2 s; a collector that hangs is left behind."""
        provider, self._provider = self._provider, None
        if provider is None:
            return
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def stop() -> None:
            provider.shutdown()
            with suppress(RuntimeError):  # the loop has not waited and is closed
                loop.call_soon_threadsafe(done.set)

        # A daemon thread: neither the loop's executor nor the interpreter's end waits for it.
        threading.Thread(target=stop, name="otlp-shutdown", daemon=True).start()
        try:
            async with asyncio.timeout(_SHUTDOWN_S):
                await done.wait()
        except TimeoutError:
            logging.getLogger(__name__).warning("spans were not delivered: the collector hangs")

    def _wall_ns(self, seconds: float) -> int:
        return self._offset_ns + round(seconds * 1e9)


def _is_disabled() -> bool:
    return os.environ.get(OTEL_SDK_DISABLED, "").strip().lower() == "true"


def carrier_from(pairs: Mapping[str, str] | Iterable[tuple[str, str | bytes]] | None) -> Carrier:
    """The W3C headers among NATS headers or gRPC metadata."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs or ()
    return {
        key.lower(): value
        for key, value in items
        if key.lower() in _CARRIER_KEYS and isinstance(value, str)
    }


def metadata_from(carrier: Carrier) -> tuple[tuple[str, str], ...]:
    """A carrier as gRPC metadata."""
    return tuple(carrier.items())


def trace_id_of(carrier: Carrier) -> str:
    """32 hex digits, or empty without a valid ``traceparent``."""
    context = trace.get_current_span(_PROPAGATOR.extract(carrier)).get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


def _link(carrier: Carrier) -> trace.Link | None:
    context = trace.get_current_span(_PROPAGATOR.extract(carrier)).get_span_context()
    return trace.Link(context) if context.is_valid else None
