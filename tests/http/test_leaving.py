"""Clients that leave, or take nothing: both pools get their blocks back."""

import asyncio
import json
import random
import socket
from typing import Any

import pytest
from support.cluster import Cluster, baton_up, until
from support.engines import VOCAB_SIZE
from support.openai_http import COMPLETIONS, http_client, post

from common.types import SamplingParams
from engine.oracle import reference_ids

NUM_LEAVING = 60


def body_of(rng: random.Random) -> dict[str, Any]:
    prompt = rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 200))
    return {
        "prompt": prompt, "max_tokens": rng.randint(50, 400), "temperature": 0,
        "stream": rng.random() < 0.6, "n": rng.choice([1, 1, 1, 3]), "return_token_ids": True,
    }  # fmt: skip


async def leave(cluster: Cluster, body: dict[str, Any], after_s: float) -> None:
    """Closes the connection in the middle, whatever was under way."""
    host, _, port = cluster.http.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    try:
        async with asyncio.timeout(after_s):
            while await reader.read(1 << 16):
                pass
    except TimeoutError:
        pass
    writer.transport.abort()


@pytest.mark.fault("F15")
async def test_leaving_at_any_moment(oracle: Cluster) -> None:
    rng = random.Random(5)
    (gateway,) = oracle.of_role("gateway")
    before = (await oracle.debug(gateway, "gateway"))["counters"]
    cases = [(body_of(rng), rng.uniform(0, 0.6)) for _ in range(NUM_LEAVING)]
    gate = asyncio.Semaphore(12)

    async def one(body: dict[str, Any], after_s: float) -> None:
        async with gate:
            await leave(oracle, body, after_s)

    await asyncio.gather(*(one(*case) for case in cases))
    await oracle.until_clean()
    after = (await oracle.debug(gateway, "gateway"))["counters"]
    assert after["cancelled"] - before["cancelled"] > NUM_LEAVING / 4
    async with http_client(oracle.http) as client:
        answer = await post(
            client,
            COMPLETIONS,
            {"prompt": [4, 5], "max_tokens": 5, "temperature": 0, "return_token_ids": True},
        )
    params = SamplingParams(max_tokens=5, seed=0, temperature=0.0)
    assert answer["choices"][0]["token_ids"] == reference_ids([4, 5], params, VOCAB_SIZE)


def connected(address: str) -> socket.socket:
    """With a receive buffer that is full at once, whatever the machine's defaults."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, _, port = address.partition(":")
    client.connect((host, int(port)))
    return client


@pytest.mark.timeout(90)
@pytest.mark.full
@pytest.mark.fault("F30")
async def test_a_client_that_never_reads(tmp_path: Any) -> None:
    """Its connection is open and its window closed: the kernel gives it up, the request ends."""
    flags = ["--num-blocks", "512", "--slow-client-s", "1"]
    async with baton_up(tmp_path, flags=flags) as cluster:
        data = json.dumps({"prompt": [1], "max_tokens": 1500, "logprobs": 20, "stream": True})
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        (gateway,) = cluster.of_role("gateway")

        async def is_over() -> bool:
            counters = (await cluster.debug(gateway, "gateway"))["counters"]
            return bool(counters["cancelled"] + counters["failed"])

        with connected(cluster.http) as client:
            client.sendall(f"{head}{data}".encode())
            await until(is_over, 60)
            await cluster.until_clean(20)
