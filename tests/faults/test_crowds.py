"""Many at once: idle connections, slow clients beside good ones, everybody back at the same time,
and a burst after silence. Long, so in `make test-full`.
"""

import asyncio
import resource
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack

import psutil
import pytest
import pytest_asyncio
from faults.history import watch
from faults.load import Load
from support.cluster import Cluster, baton_up
from support.oracle_requests import make_cases

from common.client import BatonClient, make_request
from common.errors import Unavailable
from common.rpc import make_public_channel
from common.wire import inference_grpc

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

FLAGS = ["--num-blocks", "256", "--step-delay-ms", "3", "--lease-s", "3"]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
NUM_IDLE = 10_000
# Descriptors that this process needs for itself.
SPARE = 500
MAX_BYTES_EACH = 32 << 10


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with baton_up(tmp_path_factory.mktemp("crowds"), flags=FLAGS) as cluster:
        yield cluster


@pytest.mark.fault("F32")
async def test_ten_thousand_idle_connections(cluster: Cluster) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    num_idle = min(NUM_IDLE, limit - SPARE)
    gateway = psutil.Process(cluster.of_role("gateway")[0].pid)
    before = gateway.memory_info().rss
    host, _, port = cluster.grpc.rpartition(":")
    with ExitStack() as stack:
        for number in range(num_idle):
            connection = socket.create_connection((host, int(port)))
            stack.callback(connection.close)
            connection.sendall(PREFACE)
            if number % 200 == 0:
                await asyncio.sleep(0)
        load = Load(num_clients=8, max_tokens=(5, 20))
        async with load.on([cluster.grpc], seed=1):
            await load.until_more(40)
        grown = gateway.memory_info().rss - before
        print(f"{num_idle} idle connections: {grown / num_idle / 1024:.1f} KiB each")
    for history in load.histories:
        assert history.refusal is None and history.faults() == []
    assert grown < num_idle * MAX_BYTES_EACH
    await cluster.until_clean(30)


@pytest.mark.fault("F30")
async def test_slow_clients_beside_good_ones(cluster: Cluster) -> None:
    """200 that read nothing for as long as it takes; 50 that do not notice."""
    cases = make_cases(2, 200, (1, 30), (20, 40))
    async with make_public_channel(cluster.grpc) as channel:
        stub = inference_grpc.InferenceServiceStub(channel)
        slow = [stub.Generate(make_request(case.prompt_ids, case.sampling)) for case in cases]
        load = Load(num_clients=50, max_tokens=(5, 20))
        async with load.on([cluster.grpc], seed=3):
            await load.until_more(150)
        for history in load.histories:
            assert history.refusal is None and history.faults() == []
        for call in slow:
            call.cancel()
    await cluster.until_clean(30)


@pytest.mark.fault("F31")
async def test_everybody_is_back_at_once_after_a_gateway_restart(cluster: Cluster) -> None:
    (gateway,) = cluster.of_role("gateway")
    load = Load(num_clients=100, max_tokens=(5, 20), patience_s=60.0)
    async with load.on([cluster.grpc], seed=4):
        await load.until_more(50)
        gateway.kill(signal.SIGKILL)
        await cluster.until_back(gateway)
        await load.until_more(200)
    cut_off = 0
    for history in load.histories:
        assert history.faults() == []
        # Streams end with their gateway; what had given no token was asked again.
        assert history.refusal is None or isinstance(history.refusal, Unavailable)
        cut_off += history.refusal is not None
    assert cut_off <= 100
    await cluster.until_clean(30)


@pytest.mark.fault("F36")
async def test_a_burst_after_long_silence(cluster: Cluster) -> None:
    """Idle for three times the lease, the death limit and every keepalive."""
    async with BatonClient(cluster.grpc) as client:
        for case in make_cases(5, 4, (20, 60), (4, 8)):
            assert (await watch(client, case)).faults() == []
        await asyncio.sleep(13.0)
        cases = make_cases(6, 40, (20, 60), (4, 8))
        for history in await asyncio.gather(*(watch(client, case) for case in cases)):
            assert history.refusal is None and history.faults() == []
    await cluster.until_clean()


@pytest.mark.fault("F25")
async def test_a_worker_that_gets_no_more_memory(cluster: Cluster) -> None:
    """Its steps fail or it dies; either way every answer is right, or ends with a typed error."""
    async with cluster.another("decode", "--num-blocks", "512") as victim:
        process = psutil.Process(victim.pid)
        used = process.memory_info().vms
        process.rlimit(psutil.RLIMIT_AS, (used, used))
        load = Load(num_clients=16)
        async with load.on([cluster.grpc], seed=7):
            await load.until_more(60)
    # A process without memory may say anything.
    for log in cluster.log.parent.glob("another-decode-*.log"):
        log.unlink()
    for history in load.histories:
        assert history.faults() == [], history.refusal
    await cluster.until_clean(15)
