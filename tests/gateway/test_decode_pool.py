"""The pool's links follow the registry, whatever comes and goes."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from common.wire import worker as wire
from gateway.decode_link import Dial
from gateway.decode_pool import DecodePool
from gateway.prefix_index import PrefixIndex
from gateway.registry import WorkerEntry, WorkerRegistry
from gateway.router import Router
from gateway.run import Runs
from tests.gateway.test_books import report


def answering(entry: WorkerEntry) -> Dial:
    """A worker that says hello and then nothing."""

    async def dial(
        requests: AsyncIterator[wire.StreamRequest],
    ) -> AsyncIterator[wire.StreamResponse]:
        async for _ in requests:
            yield wire.StreamResponse(hello=wire.StreamHello(num_blocks=8))

    return dial


def make_pool(dialer=answering) -> tuple[DecodePool, WorkerRegistry]:  # type: ignore[no-untyped-def]
    registry = WorkerRegistry(
        3.0,
        lambda: asyncio.get_running_loop().time(),
        on_join=lambda entry: pool.join(entry),
        on_leave=lambda worker_id, died: pool.leave(worker_id, died),
        on_orphan=lambda request_id, attempt: None,
    )
    router = Router("auto", registry, PrefixIndex(), seed="")
    pool = DecodePool("gw", Runs(), registry, router, 3.0, dialer, lambda: None)
    return pool, registry


async def until_connected(pool: DecodePool) -> None:
    async with asyncio.timeout(3):
        while not pool.alive("d1"):
            await asyncio.sleep(0.005)


@pytest.mark.fault("F3")
async def test_a_worker_started_anew_under_its_old_id_is_used_again() -> None:
    pool, registry = make_pool()
    registry.report(report("d1", role="decode", epoch=1))
    await until_connected(pool)
    first = pool.links["d1"]
    registry.report(report("d1", role="decode", epoch=2))
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert pool.links["d1"] is not first
    assert pool.alive("d1")
    await pool.close()
    assert pool.links == {}


async def test_a_link_that_fails_in_any_way_is_dialled_again() -> None:
    num_dials = 0

    def dialer(entry: WorkerEntry) -> Dial:
        nonlocal num_dials
        num_dials += 1
        if num_dials == 1:
            raise ValueError("no such endpoint")
        return answering(entry)

    pool, registry = make_pool(dialer)
    registry.report(report("d1", role="decode"))
    await until_connected(pool)
    assert num_dials == 2
    await pool.close()
