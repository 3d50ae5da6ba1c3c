"""Another tenant's stream beside an attack: it must not notice anything."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import psutil
from faults.keys import ALICE
from support.cluster import Cluster
from support.oracle_requests import Case

from common.client import BatonClient

# Paths, addresses, process ids, tracebacks and names of our own code.
INTERNAL = re.compile(
    r"/\w+/|\d+\.\d+\.\d+\.\d+|localhost|:\d{4,5}\b|\bpid\b"
    r"|Traceback|File \"|Error\b|\.py\b|0x[0-9a-f]"
)
PROMPT_TOKENS = 40
# Nothing here takes so long; what is slow is the machine.
LONGEST_PAUSE_S = 10.0
_CASE = Case(tuple(range(PROMPT_TOKENS)), 480)


@asynccontextmanager
async def bystander(cluster: Cluster, max_growth_bytes: int) -> AsyncIterator[None]:
    """Streams of Alice one after the other, all right and none with a pause longer than
    `LONGEST_PAUSE_S`; the same processes afterwards, nothing held, the gateway hardly larger."""
    pids = [process.pid for process in cluster.processes]
    gateway = psutil.Process(cluster.of_role("gateway")[0].pid)
    before = gateway.memory_info().rss
    stream = _Stream()
    async with BatonClient(cluster.grpc, api_key=ALICE) as client:
        task = asyncio.create_task(stream.run(client))
        try:
            async with asyncio.timeout(20):
                await stream.begun.wait()
            yield
            num_tokens = stream.num_tokens
            async with asyncio.timeout(20):
                while stream.num_tokens <= num_tokens and not task.done():
                    await asyncio.sleep(0.01)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled(), f"the bystander's stream broke: {task.exception()!r}"
    pauses = [after - before for before, after in pairwise(stream.arrivals_s)]
    assert max(pauses, default=0.0) < LONGEST_PAUSE_S
    await cluster.until_clean()
    assert [process.pid for process in cluster.processes] == pids
    assert gateway.memory_info().rss - before < max_growth_bytes


class _Stream:
    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.arrivals_s: list[float] = []
        self.num_tokens = 0
        self._right = _CASE.right_ids()

    async def run(self, client: BatonClient) -> None:
        """Until cancelled. Raises at the first wrong token."""
        clock = asyncio.get_running_loop().time
        while True:
            got: list[int] = []
            async for chunk in client.generate(_CASE.prompt_ids, _CASE.sampling):
                got += chunk.token_ids
                assert got == self._right[: len(got)], "a wrong token"
                self.num_tokens += len(chunk.token_ids)
                self.arrivals_s.append(clock())
                self.begun.set()
