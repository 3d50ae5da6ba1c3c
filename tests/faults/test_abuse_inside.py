"""Attacks on what tenants and processes share: the prefix cache, and the channels inside."""

import asyncio
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import pytest_asyncio
from faults.bystander import bystander
from faults.keys import ALICE, MALLORY
from grpc import aio
from support.cluster import Cluster, Process
from support.openai_http import COMPLETIONS, http_client

from common import rpc
from common.bus import (
    DISCOVER_SUBJECT,
    accept_subject,
    kv_events_subject,
    report_subject,
    ticket_subject,
    worker_cancel_subject,
    worker_job_subject,
)
from common.nats_bus import NatsBus
from common.wire import DECODE_SERVICE, KV_TRANSFER_SERVICE

pytestmark = pytest.mark.asyncio(loop_scope="session")

MAX_GROWTH_BYTES = 32 << 20


@pytest_asyncio.fixture(loop_scope="session")
async def client(guarded: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with http_client(guarded.http) as client:
        yield client


async def _cached(client: httpx2.AsyncClient, key: str, prompt: list[int], salt: str = "") -> int:
    """Tokens of the prompt that were found in a cache."""
    body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
    headers = {"authorization": f"Bearer {key}"}
    response = await client.post(COMPLETIONS, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.fault("V14")
async def test_probing_another_tenants_prefix_finds_nothing(client: httpx2.AsyncClient) -> None:
    found = []
    for number in range(20):
        secret = [number, 256 + number, 13] * 40
        assert await _cached(client, ALICE, secret) == 0
        assert await _cached(client, ALICE, secret) > 0
        probe = [*secret[: 120 - 5 * number], 511]
        salt = ("", "alice", ALICE, "tenant")[number % 4]
        found.append(await _cached(client, MALLORY, probe, salt))
    assert found == [0] * 20


@pytest.mark.fault("V15")
async def test_a_flood_leaves_others_their_share_of_the_cache(
    client: httpx2.AsyncClient,
) -> None:
    prompts = [[100 + i] * 64 for i in range(4)]
    for prompt in prompts:
        await _cached(client, ALICE, prompt)
    quiet = [await _cached(client, ALICE, prompt) for prompt in prompts]
    for number in range(60):
        await _cached(client, MALLORY, [number, 200 + number % 50] * 50)
    flooded = [await _cached(client, ALICE, prompt) for prompt in prompts]
    print(f"cached tokens of a victim: {sum(quiet)} before, {sum(flooded)} after the flood")
    assert sum(quiet) and sum(flooded) >= sum(quiet) / 2


# ---------------------------------------------------------------- channels inside


class _Bomb:
    """Touches a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


@pytest.mark.fault("V1")
async def test_pickle_bombs_on_every_internal_channel(guarded: Cluster, tmp_path: Path) -> None:
    """As someone who has got hold of all credentials."""
    mark = tmp_path / "unpickled"
    bombs = [pickle.dumps(_Bomb(mark), protocol) for protocol in (0, 2, 4)]
    async with bystander(guarded, MAX_GROWTH_BYTES):
        for bomb in bombs:
            await _over_nats(guarded, bomb)
            await _over_grpc(guarded, bomb)
            await _over_sockets(guarded, bomb)
        await asyncio.sleep(0.5)
    assert not mark.exists()
    pickle.loads(bombs[0])
    assert mark.exists(), "the bomb is a dud"


async def _over_nats(cluster: Cluster, bomb: bytes) -> None:
    (gateway,) = cluster.of_role("gateway")
    subjects = {
        "gateway": [DISCOVER_SUBJECT, *_to_workers(cluster)],
        "prefill": [
            accept_subject(gateway.id), ticket_subject(gateway.id), report_subject("mallory"),
            kv_events_subject("mallory"),
        ],
        "decode": [report_subject("mallory"), kv_events_subject("mallory")],
    }  # fmt: skip
    for role, names in subjects.items():
        process = cluster.of_role(role)[0]
        credentials = Path(_argument(process, "nats-credentials-file"))
        bus = await NatsBus.connect(_argument(process, "nats-url"), credentials, "mallory")
        try:
            for name in names:
                await bus.publish(name, bomb)
            if role == "gateway":
                await bus.ensure_job_queue(600.0)
                await bus.publish_job(bomb, f"bomb-{len(bomb)}")
        finally:
            await bus.close()


def _to_workers(cluster: Cluster) -> list[str]:
    (prefill,) = cluster.of_role("prefill")
    return [worker_job_subject(prefill.id), worker_cancel_subject(prefill.id)]


def _argument(process: Process, name: str) -> str:
    arguments = psutil.Process(process.pid).cmdline()
    return arguments[arguments.index(f"--{name}") + 1]


async def _over_grpc(cluster: Cluster, bomb: bytes) -> None:
    for worker in cluster.workers:
        service = DECODE_SERVICE if worker.role == "decode" else KV_TRANSFER_SERVICE
        methods = ("Stream",) if worker.role == "decode" else ("Hello", "Claim", "Renew", "Settle")
        async with rpc.make_internal_channel(worker.grpc, cluster.token, None) as channel:
            for method in methods:
                # Some pickles are protobuf messages of unknown fields as well: then there is an
                # answer, and it is that of an empty message.
                try:
                    if method == "Stream":
                        await _all(channel.stream_stream(f"/{service}/{method}")(iter([bomb])))
                    else:
                        await channel.unary_unary(f"/{service}/{method}")(bomb)
                except aio.AioRpcError as error:
                    assert error.code().name == "INVALID_ARGUMENT", error


async def _all(call: Any) -> None:
    async for _ in call:
        pass


async def _over_sockets(cluster: Cluster, bomb: bytes) -> None:
    for process in cluster.processes:
        for address in filter(None, (process.grpc, process.admin, process.http)):
            host, _, port = address.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(bomb)
            await asyncio.sleep(0.01)
            writer.close()
