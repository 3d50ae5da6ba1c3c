"""A whole run whose internal links are all under mutual TLS."""

from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.certificates import make_authority, make_tls_files
from support.cluster import baton_up
from support.oracle_requests import ask_all, make_cases

from common import rpc
from common.client import BatonClient


async def test_requests_over_mutual_tls(tmp_path: Path) -> None:
    tls = make_tls_files(tmp_path, "run", make_authority(tmp_path))
    flags = [
        *("--num-blocks", "128", "--transport", "shm", "--tls-cert-file", str(tls.cert)),
        *("--tls-key-file", str(tls.key), "--tls-ca-file", str(tls.ca)),
    ]
    async with baton_up(tmp_path, flags=flags) as cluster:
        async with BatonClient(cluster.grpc) as client:
            cases = make_cases(2, 6, prompt_tokens=(20, 90), max_tokens=(8, 30))
            for answer in await ask_all(client, cases):
                answer.assert_right()
        await cluster.until_clean()
        (decode,) = cluster.of_role("decode")
        statistics = await cluster.debug(decode, "statistics")
        assert statistics["imports"]["num_blocks"]["shm"] > 0
        check = health_pb2.HealthCheckRequest()
        for process in cluster.workers:
            async with rpc.make_internal_channel(process.grpc, cluster.token, tls) as channel:
                await health_pb2_grpc.HealthStub(channel).Check(check, timeout=5)
            # Without a certificate not even the health is told.
            async with aio.insecure_channel(process.grpc) as channel:
                with pytest.raises(grpc.RpcError):
                    await health_pb2_grpc.HealthStub(channel).Check(check, timeout=2)
