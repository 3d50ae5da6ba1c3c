"""Ten thousand clients that leave, at a random moment of a random phase.

Every step of the protocol takes a while, so that cancels meet each of them. What counts is what is
left: blocks in either ledger, memory of each process, open files, files in the pool's folder.
"""

import asyncio
import random
from contextlib import suppress

import psutil
from faults.figures import GOALS
from faults.history import watch
from faults.soak_kills import until_clean
from faults.stage import Stage
from support.cluster import Cluster, baton_up
from support.oracle_requests import Case, make_cases

from common.client import BatonClient
from common.errors import BatonError
from common.failpoints import FAILPOINTS

GOAL = GOALS["cancels"][1]
AT_ONCE = 32
BATCH, WARM_UP = 500, 20
# How late the latest cancel comes; a request that nobody cancels takes about as long.
LATEST_S = 0.7
OFTEN = {"decode.copy_block", "prefill.chunk", "decode.before_send", "decode.after_send"}
RARE = {"transfer.corrupt_block", "transfer.corrupt_checksum", "worker.report", "engine.step",
        "engine.row", "gateway.before_heartbeat", "decode.before_heartbeat"}  # fmt: skip
SLOW = ";".join(f"{name}=sleep:0.01" for name in sorted(FAILPOINTS.keys() - OFTEN - RARE))
FLAGS = ["--num-blocks", "256", "--step-delay-ms", "1", "--lease-s", "3",
         "--max-num-batched-tokens", "64", "--allow-failpoints", "--failpoints",
         f"{SLOW};decode.copy_block=sleep:0.003"]  # fmt: skip


async def cancels(stage: Stage) -> None:
    if not stage.goes_on("cancels", GOAL):
        return
    async with baton_up(stage.folder, flags=FLAGS) as cluster:
        # What is made once is made before anything is measured: the rings of steps are full and
        # garbage was collected once (some 8,000 cancels later, common/ready.py).
        for _ in range(WARM_UP):
            await _batch(stage, cluster, counts=False)
        before = _Sizes(cluster)
        while stage.goes_on("cancels", GOAL):
            await _batch(stage, cluster, counts=True)
        await until_clean(stage, cluster)
        await asyncio.sleep(1.0)
        before.compare(stage, cluster)
        async with BatonClient(cluster.grpc) as client:
            last = make_cases(stage.seed, 8, (1, 200), (20, 60))
            stage.judge([await watch(client, case) for case in last], "after all cancels")


async def _batch(stage: Stage, cluster: Cluster, counts: bool) -> None:
    rng = random.Random(stage.rng.getrandbits(64))
    gate = asyncio.Semaphore(AT_ONCE)
    cases = make_cases(rng.getrandbits(32), BATCH, (1, 300), (20, 80))
    async with BatonClient(cluster.grpc) as shared:

        async def one(case: Case, after_s: float, own: bool) -> str:
            async with gate:
                if not own:
                    return await _leave(shared, case, after_s)
                async with BatonClient(cluster.grpc) as client:
                    return await _leave(client, case, after_s)

        ends = await asyncio.gather(
            *(one(case, rng.uniform(0, LATEST_S), rng.random() < 0.1) for case in cases)
        )
    if counts:
        for end in ends:
            stage.figures.counts["cancels" if end != "answered" else "answered first"] += 1
            stage.figures.counts[f"left {end}"] += end != "answered"


async def _leave(client: BatonClient, case: Case, after_s: float) -> str:
    """Where the request was when its client left."""
    num_tokens = 0
    with suppress(TimeoutError, BatonError):
        async with asyncio.timeout(after_s):
            async for chunk in client.generate(case.prompt_ids, case.sampling):
                num_tokens += len(chunk.token_ids)
            return "answered"
    return "before the first token" if num_tokens == 0 else "in mid-answer"


class _Sizes:
    def __init__(self, cluster: Cluster) -> None:
        self._rss, self._fds = _sizes(cluster)
        self._files = len(list(cluster.pool_dir.iterdir()))

    def compare(self, stage: Stage, cluster: Cluster) -> None:
        rss, fds = _sizes(cluster)
        for label, size in rss.items():
            stage.figures.sample(f"memory of {label} MiB", (size - self._rss[label]) / (1 << 20))
        counts = stage.figures.counts
        counts["files left"] += len(list(cluster.pool_dir.iterdir())) - self._files
        # A connection or two may be on its way.
        more = {label: num - self._fds[label] for label, num in fds.items()}
        counts["descriptors left"] += sum(num for num in more.values() if num > 4)


def _sizes(cluster: Cluster) -> tuple[dict[str, int], dict[str, int]]:
    processes = {process.role: psutil.Process(process.pid) for process in cluster.processes}
    rss = {role: process.memory_info().rss for role, process in processes.items()}
    return rss, {role: process.num_fds() for role, process in processes.items()}
