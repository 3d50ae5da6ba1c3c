"""Spans from `Telemetry` through a real exporter and socket into the receiver of `baton up`."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

from cli.otlp import OtlpReceiver, TraceSpan, spans_of
from common.rpc import bind, make_public_server
from common.telemetry import Carrier, Telemetry, carrier_from, metadata_from, trace_id_of

TOKEN = "the run's token"


@pytest.fixture
async def receiver() -> AsyncIterator[OtlpReceiver]:
    running = OtlpReceiver(TOKEN)
    yield running
    await running.stop()


async def spans(receiver: OtlpReceiver, id_: str, num: int) -> dict[str, TraceSpan]:
    """The trace's spans by name, once there are ``num``."""
    for _ in range(500):
        found = receiver.find(id_)
        if found is not None and len(got := spans_of(found.resource_spans)) >= num:
            assert len(got) == num
            return {span.name: span for span in got}
        await asyncio.sleep(0.01)
    raise AssertionError(f"not {num} spans of {id_}: {receiver.statistics()}")


async def test_one_tree_over_two_processes(receiver: OtlpReceiver) -> None:
    endpoint = await receiver.start()
    gateway = Telemetry("baton-gateway", "gw-1", endpoint, otlp_token=TOKEN)
    worker = Telemetry("baton-prefill", "p-1", endpoint, otlp_token=TOKEN)
    assert gateway.enabled
    with gateway.span("request", attributes={"baton.request_id": "r-7"}) as root:
        headers = {"Nats-Msg-Id": "x", **root.carrier}
        with worker.span("prefill", parent=carrier_from(headers)) as span:
            span.set("baton.num_tokens", 12)
            span.event("first_token", {"index": 0})
        metadata = [*metadata_from(root.carrier), ("authorization", "Bearer secret")]
        with worker.span("decode", parent=carrier_from(metadata), links=[span.carrier]):
            pass
    got = await spans(receiver, root.trace_id, 3)
    assert got == await spans(receiver, "r-7", 3)
    root_span = got["request"]
    assert root_span.parent_id == "" and root_span.trace_id == root.trace_id
    assert (root_span.service, root_span.instance) == ("baton-gateway", "gw-1")
    assert got["prefill"].parent_id == got["decode"].parent_id == root_span.span_id
    assert got["prefill"].service == "baton-prefill"
    assert got["prefill"].attributes == {"baton.num_tokens": 12}
    assert [event.name for event in got["prefill"].events] == ["first_token"]
    assert got["decode"].links == ((root.trace_id, got["prefill"].span_id),)
    assert {span.status for span in got.values()} == {"unset"}
    assert root_span.start_ns <= got["prefill"].start_ns <= got["prefill"].end_ns
    assert got["prefill"].end_ns <= root_span.end_ns
    await asyncio.gather(gateway.shutdown(), worker.shutdown())


async def test_errors_cancels_and_ends(receiver: OtlpReceiver) -> None:
    telemetry = Telemetry("baton-gateway", "gw-1", await receiver.start(), otlp_token=TOKEN)
    root = telemetry.start_span("root")

    async def work() -> None:
        with telemetry.span("cancelled", parent=root.carrier):
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(KeyError), telemetry.span("raised", parent=root.carrier):
        raise KeyError("x")
    with telemetry.span("ended", parent=root.carrier) as span:
        span.end("worker_lost")
    root.end()
    root.end("too late")
    got = await spans(receiver, root.trace_id, 4)
    assert (got["cancelled"].status, got["cancelled"].error) == ("error", "cancelled")
    assert (got["raised"].status, got["raised"].error) == ("error", "KeyError")
    assert got["ended"].attributes == {"error.type": "worker_lost"}
    assert got["root"].status == "unset"
    await telemetry.shutdown()


async def test_recorded_spans_have_the_times_of_the_clock(receiver: OtlpReceiver) -> None:
    loop = asyncio.get_running_loop()
    telemetry = Telemetry("baton-decode", "d-1", await receiver.start(), loop.time, TOKEN)
    before = time.time_ns()
    end_s = loop.time()
    root = telemetry.record_span("step", end_s - 0.25, end_s, attributes={"num_sequences": 3})
    chunk = telemetry.record_span("chunk", end_s - 0.2, end_s - 0.1, root, links=[root])
    assert trace_id_of(chunk) == trace_id_of(root) != ""
    got = await spans(receiver, trace_id_of(root), 2)
    assert got["step"].duration_ms == pytest.approx(250, abs=0.01)
    assert got["chunk"].duration_ms == pytest.approx(100, abs=0.01)
    assert got["chunk"].parent_id == got["step"].span_id
    assert abs(got["step"].end_ns - before) < 50e6
    await telemetry.shutdown()


async def test_without_an_endpoint_nothing_is_recorded_and_carriers_pass() -> None:
    telemetry = Telemetry("baton-decode", "d-1", None)
    assert not telemetry.enabled
    carrier = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"}
    with telemetry.span("a", parent=carrier) as span:
        span.set("x", 1)
        span.event("y")
        assert span.carrier == carrier and span.trace_id == "ab" * 16
    with telemetry.span("a") as span:
        assert span.carrier == {} and span.trace_id == ""
    assert telemetry.record_span("b", 0, 1, carrier) == carrier
    begin = time.perf_counter()
    for _ in range(10_000):
        telemetry.record_span("b", 0, 1, carrier)
    assert time.perf_counter() - begin < 0.5
    await telemetry.shutdown()


def test_the_environment_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """In OpenTelemetry's own words, whatever endpoint is set."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "True")
    telemetry = Telemetry("baton-gateway", "gw-1", "127.0.0.1:1")
    assert not telemetry.enabled
    with telemetry.span("request") as span:
        assert not span.carrier and not span.trace_id


@pytest.mark.parametrize("value", ["", "00-zz-zz-01", "x" * 10_000, "00-" + "0" * 32])
async def test_a_hostile_traceparent_starts_a_new_trace(receiver: OtlpReceiver, value: str) -> None:
    telemetry = Telemetry("baton-gateway", "gw-1", await receiver.start(), otlp_token=TOKEN)
    carrier: Carrier = carrier_from([("Traceparent", value), ("tracestate", b"\xff")])
    with telemetry.span("request", parent=carrier, links=[carrier]) as span:
        pass
    assert (await spans(receiver, span.trace_id, 1))["request"].parent_id == ""
    await telemetry.shutdown()


@pytest.mark.parametrize("collector", ["down", "black hole"])
@pytest.mark.fault("F37")
async def test_a_dead_collector_costs_two_seconds_at_the_end_and_nothing_before(
    collector: str,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1] if collector == "black hole" else 1
        telemetry = Telemetry("baton-gateway", "gw-1", f"127.0.0.1:{port}")
        begin = time.perf_counter()
        for _ in range(1000):
            with telemetry.span("request"):
                pass
        assert time.perf_counter() - begin < 1
        begin = time.perf_counter()
        await telemetry.shutdown()
        assert time.perf_counter() - begin < 2.5


async def test_the_receiver_forgets_the_oldest() -> None:
    receiver = OtlpReceiver(TOKEN, max_traces=3)
    telemetry = Telemetry("baton-gateway", "gw-1", await receiver.start(), otlp_token=TOKEN)
    ids = []
    for i in range(5):
        with telemetry.span("request", attributes={"baton.request_id": f"r{i}"}) as span:
            ids.append(span.trace_id)
    await telemetry.shutdown()
    await spans(receiver, ids[-1], 1)
    kept = [receiver.find(id_) is not None for id_ in ids]
    assert kept == [False, False, True, True, True]
    assert receiver.find("r0") is None and receiver.find("r4") is not None
    assert receiver.statistics().num_evicted == 2
    await receiver.stop()


async def test_the_receiver_is_bounded_by_bytes() -> None:
    receiver = OtlpReceiver(TOKEN, max_bytes=20_000)
    telemetry = Telemetry("baton-gateway", "gw-1", await receiver.start(), otlp_token=TOKEN)
    for _ in range(50):
        with telemetry.span("request", attributes={"text": "x" * 1000}):
            pass
    await telemetry.shutdown()
    statistics = receiver.statistics()
    assert 10 < statistics.num_traces < 20 and statistics.num_bytes <= 20_000
    await receiver.stop()


async def test_the_receiver_forwards() -> None:
    """To a collector, which is not told our token."""
    collector = make_public_server(1 << 20)
    exported: list[service.ExportTraceServiceRequest] = []

    async def export(
        request: service.ExportTraceServiceRequest, context: Any
    ) -> service.ExportTraceServiceResponse:
        assert "authorization" not in dict(context.invocation_metadata())
        exported.append(request)
        return service.ExportTraceServiceResponse()

    handler = grpc.unary_unary_rpc_method_handler(
        export,
        request_deserializer=service.ExportTraceServiceRequest.FromString,
        response_serializer=service.ExportTraceServiceResponse.SerializeToString,
    )
    name = service.DESCRIPTOR.services_by_name["TraceService"].full_name
    collector.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(name, {"Export": handler}),)
    )
    port = bind(collector, "127.0.0.1", 0)
    await collector.start()
    other = OtlpReceiver(TOKEN, forward_to=f"127.0.0.1:{port}")
    telemetry = Telemetry("baton-gateway", "gw-1", await other.start(), otlp_token=TOKEN)
    with telemetry.span("request") as span:
        pass
    await spans(other, span.trace_id, 1)
    await telemetry.shutdown()
    await other.stop()
    assert other.statistics().num_forwarded >= 1
    parts = [part.SerializeToString() for r in exported for part in r.resource_spans]
    assert [found.name for found in spans_of(parts)] == ["request"]
    await collector.stop(0)


async def test_a_stranger_sends_no_spans(receiver: OtlpReceiver) -> None:
    endpoint = await receiver.start()
    for token in ("", "another token"):
        telemetry = Telemetry("baton-gateway", "gw-1", endpoint, otlp_token=token)
        with telemetry.span("request"):
            pass
        await telemetry.shutdown()
    assert receiver.statistics().num_traces == 0
