"""A stranger on this machine, without credentials, at every port of a running set-up.

Answered are only: the gateway's public ports, Health/Check of any gRPC server, and ``/health`` and
``/metrics`` of admin ports. And no secret is on a command line, in an environment, in a log or in
a trace.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil
import pytest
import pytest_asyncio
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from support.cluster import Cluster, baton_up
from support.oracle_requests import ask, make_cases

from cli.otlp import spans_of
from common import rpc
from common.client import BatonClient
from common.wire import inference, supervisor, supervisor_grpc, worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGES = ("kv", "statistics", "steps", "gateway", "none", "", "kv/", "../health")
MESSAGES = (inference, worker, supervisor, health_pb2, reflection_pb2, trace_service_pb2)
METHODS = [
    f"/{service.full_name}/{method.name}"
    for messages in MESSAGES
    for service in messages.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
PUBLIC = {
    "/baton.v1.InferenceService/Generate",
    "/baton.v1.InferenceService/GetModelInfo",
    "/baton.v1.InferenceService/ListWorkers",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
}
WRONG = ("", "Bearer ", "Bearer wrong", "Basic d3Jvbmc=")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    flags = ["--num-blocks", "64", "--log-level", "debug"]
    # What gRPC says of its calls at this level has tracebacks in it.
    async with baton_up(
        tmp_path_factory.mktemp("ports"), flags=flags, allow_tracebacks=True
    ) as cluster:
        yield cluster


def processes(cluster: Cluster) -> list[psutil.Process]:
    up = psutil.Process(cluster.process.pid)
    return [up, *up.children(recursive=True)]


def listening(process: psutil.Process) -> set[str]:
    """Addresses, host:port, at which it takes connections or datagrams."""
    return {
        # gRPC's sockets are IPv6, bound to an IPv4 address.
        f"{connection.laddr.ip.removeprefix('::ffff:')}:{connection.laddr.port}"
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
        or (connection.type.name == "SOCK_DGRAM" and not connection.raddr)
    }


def state(cluster: Cluster) -> dict[str, Any]:
    return dict(json.loads(cluster.state_file.read_text()))


def otlp_address(cluster: Cluster) -> str:
    (address,) = listening(processes(cluster)[0]) - {state(cluster)["supervisor"]}
    return address


def data_ports(cluster: Cluster) -> set[str]:
    """What workers listen on beside gRPC and admin: the KV data ports."""
    return {
        address
        for process in cluster.workers
        for address in listening(psutil.Process(process.pid)) - {process.grpc, process.admin}
    }


def secrets(cluster: Cluster) -> dict[str, str]:
    found = {"token": cluster.token}
    for path in cluster.state_file.parent.glob("nats/nats-*.json"):
        found[path.name] = json.loads(path.read_text())["password"]
    assert len(found) == 4
    return found


# ---------------------------------------------------------------- who listens


@pytest.mark.fault("V3")
async def test_everything_listens_on_loopback_and_is_known(cluster: Cluster) -> None:
    everything = {process: listening(process) for process in processes(cluster)}
    addresses = set().union(*everything.values())
    assert {address.rpartition(":")[0] for address in addresses} == {"127.0.0.1"}
    known = {address for process in cluster.processes for address in (process.grpc, process.admin)}
    known |= {cluster.http, state(cluster)["supervisor"], otlp_address(cluster)}
    known |= listening(cluster.child("nats-server"))
    assert known <= addresses
    assert addresses - known == data_ports(cluster)
    assert len(data_ports(cluster)) == 1  # only who has KV to give has one
    assert not [c for p in everything for c in p.net_connections("unix") if c.laddr and p.pid]


# ---------------------------------------------------------------- gRPC


async def status_of(channel: aio.Channel, method: str, authorization: str) -> StatusCode:
    """Of a call of any shape with one empty message."""
    call = channel.unary_stream(method)(
        b"", metadata=(("authorization", authorization),), timeout=5
    )
    try:
        async for _ in call:
            call.cancel()
        return StatusCode.OK
    except aio.AioRpcError as error:
        return error.code()
    except asyncio.CancelledError:
        return StatusCode.OK


@pytest.mark.fault("V3", "V20")
async def test_internal_grpc_needs_the_token(cluster: Cluster) -> None:
    targets = [process.grpc for process in cluster.workers]
    targets += [state(cluster)["supervisor"], otlp_address(cluster)]
    for target in targets:
        async with aio.insecure_channel(target) as channel:
            for method in METHODS:
                if method == HEALTH_CHECK:
                    continue
                for authorization in WRONG:
                    got = await status_of(channel, method, authorization)
                    assert got is StatusCode.UNAUTHENTICATED, (target, method, authorization)


@pytest.mark.fault("V20")
async def test_health_is_for_anyone(cluster: Cluster) -> None:
    for process in cluster.processes:
        async with aio.insecure_channel(process.grpc) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=5
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_public_port_serves_nothing_else(cluster: Cluster) -> None:
    async with aio.insecure_channel(cluster.grpc) as channel:
        for method in METHODS:
            got = await status_of(channel, method, f"Bearer {cluster.token}")
            assert (got is StatusCode.UNIMPLEMENTED) == (method not in PUBLIC), (method, got)


# ---------------------------------------------------------------- HTTP, NATS, KV data


async def http(address: str, path: str, authorization: str | None = None) -> tuple[int, str]:
    header = f"Authorization: {authorization}\r\n" if authorization is not None else ""
    answer = await say(
        address,
        f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header}\r\n".encode(),
    )
    head, _, body = answer.decode(errors="replace").partition("\r\n\r\n")
    return int(head.split()[1]), body


async def say(address: str, data: bytes) -> bytes:
    """All that is answered to ``data`` before the other end hangs up."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        async with asyncio.timeout(5):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_admin_ports_tell_a_stranger_health_and_metrics(cluster: Cluster) -> None:
    for process in cluster.processes:
        assert (await http(process.admin, "/health"))[0] == 200
        status, metrics = await http(process.admin, "/metrics")
        assert status == 200 and "# TYPE" in metrics
        assert not any(secret in metrics for secret in secrets(cluster).values())
        for page in PAGES:
            for authorization in (None, *WRONG):
                status, body = await http(process.admin, f"/debug/{page}", authorization)
                assert status in (307, 401, 404), (process.id, page, authorization)
                assert len(body) < 20
        for path in ("/", "/docs", "/openapi.json", "//debug/kv", "/debug", "/debug/kv?x=1"):
            assert (await http(process.admin, path))[0] in (307, 401, 404), path
        assert (await http(process.admin, "/debug/none", f"Bearer {cluster.token}"))[0] == 404


async def test_the_public_http_port_serves_nothing_of_the_inside(cluster: Cluster) -> None:
    assert (await http(cluster.http, "/health"))[0] == 200
    status, metrics = await http(cluster.http, "/metrics")
    assert status == 200 and not any(secret in metrics for secret in secrets(cluster).values())
    for page in PAGES:
        for authorization in (None, f"Bearer {cluster.token}"):
            status, body = await http(cluster.http, f"/debug/{page}", authorization)
            assert status == 404 and '"error"' in body, page
    for path in ("/", "/docs", "/openapi.json"):
        assert (await http(cluster.http, path))[0] == 404, path


@pytest.mark.fault("V3")
async def test_nats_takes_no_stranger(cluster: Cluster) -> None:
    (address,) = listening(cluster.child("nats-server"))
    for options in ("{}", '{"user":"gateway","pass":"x"}', '{"auth_token":"x"}'):
        answer = await say(address, f"CONNECT {options}\r\nSUB > 1\r\nPING\r\n".encode())
        assert b"Authorization Violation" in answer and b"PONG" not in answer


async def test_the_data_port_says_nothing(cluster: Cluster) -> None:
    for address in data_ports(cluster):
        for data in (b"", b"x", b"GET / HTTP/1.0\r\n\r\n", b"BTKV\x00\x01" + bytes(32)):
            assert await say(address, data) == b""


# ---------------------------------------------------------------- secrets


def logs(cluster: Cluster) -> Iterator[tuple[str, str]]:
    run_dir = cluster.state_file.parent
    for path in (cluster.log, *run_dir.glob("*.log"), *run_dir.glob("nats/*.log")):
        yield path.name, path.read_text(errors="replace")


@pytest.mark.fault("V5", "V25")
async def test_no_secret_is_told(cluster: Cluster) -> None:
    cases = make_cases(5, 6, prompt_tokens=(20, 90), max_tokens=(8, 16))
    async with BatonClient(cluster.grpc) as client:
        answers = [await ask(client, case) for case in cases]
    await asyncio.sleep(0.5)  # spans are sent in batches
    told = {name: text for name, text in logs(cluster)}
    assert len(told) >= 5 and any(told.values())
    for process in processes(cluster):
        told[f"command line of {process.name()}"] = " ".join(process.cmdline())
        told[f"environment of {process.name()}"] = " ".join(process.environ().values())
    async with rpc.make_internal_channel(state(cluster)["supervisor"], cluster.token) as channel:
        stub = supervisor_grpc.SupervisorServiceStub(channel)
        for answer in answers:
            assert answer.completion is not None
            trace = await stub.GetTrace(supervisor.GetTraceRequest(id=answer.completion.trace_id))
            spans = spans_of(trace.resource_spans)
            assert len(spans) > 5
            told[f"trace {trace.trace_id}"] = repr(spans)
    for where, text in told.items():
        for name, secret in secrets(cluster).items():
            assert secret not in text, f"{name} is in {where}"
        assert "secret" not in text.lower(), where
        assert "permissions violation" not in text.lower(), where
        assert "a handler failed" not in text and "NotImplemented" not in text, where


@pytest.mark.fault("V5")
async def test_files_are_for_their_owner_alone(cluster: Cluster) -> None:
    run_dir = cluster.state_file.parent
    for path in (run_dir, run_dir / "nats", run_dir.parent):
        assert path.stat().st_mode & 0o077 == 0
    private = [cluster.state_file, run_dir / "token", *run_dir.glob("nats/nats-*.json")]
    private += [run_dir / "nats" / "nats-server.conf", *cluster.pool_dir.iterdir()]
    for path in private:
        assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_uid == os.geteuid()
