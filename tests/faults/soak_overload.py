"""Arrivals at one, two and five times what the workers can do: goodput, refusals, memory.

Capacity is what the same cluster gives just before when it is offered twice what a closed loop
gets. A request is good when its whole answer is right.
"""

import asyncio
from collections import Counter

import psutil
from faults.figures import GOALS
from faults.history import History, watch
from faults.load import Load
from faults.soak_kills import until_clean
from faults.stage import Stage
from support.cluster import Cluster, baton_up
from support.oracle_requests import make_cases

from common.client import BatonClient
from common.errors import Overloaded

GOAL = GOALS["overload"][1]
SECONDS = 10.0
NUM_RUNNING, NUM_QUEUED = 4, 16
FLAGS = [
    *("--num-blocks", "128", "--max-num-seqs", str(NUM_RUNNING), "--step-delay-ms", "10"),
    *("--lease-s", "3", "--max-queued-requests", str(NUM_QUEUED)),
]
LENGTHS = {"prompt_tokens": (20, 60), "max_tokens": (8, 16)}


async def overload(stage: Stage) -> None:
    async with baton_up(stage.folder, flags=FLAGS) as cluster:
        while stage.goes_on("rounds", GOAL):
            capacity = await _open_loop(stage, cluster, 2 * await _closed_loop(stage, cluster))
            gateway = psutil.Process(cluster.of_role("gateway")[0].pid)
            before = gateway.memory_info().rss
            good = {k: await _open_loop(stage, cluster, k * capacity) for k in (1, 2, 5)}
            for times, rate in good.items():
                stage.figures.sample(f"goodput at {times}x of peak", rate / max(good.values()))
            growth = (gateway.memory_info().rss - before) / (1 << 20)
            stage.figures.sample("memory of gateway MiB", growth)
            stage.figures.counts["rounds"] += 1
        await until_clean(stage, cluster)


async def _closed_loop(stage: Stage, cluster: Cluster) -> float:
    """Good answers a second of a loop that keeps all busy and the queue full."""
    loop = asyncio.get_running_loop()
    load = Load(num_clients=NUM_RUNNING + NUM_QUEUED, pause_s=0.0, **LENGTHS)
    begun_s = loop.time()
    async with load.on([cluster.grpc], stage.rng.getrandbits(32)):
        await asyncio.sleep(SECONDS / 2)
    stage.judge(load.histories, "closed loop")
    answered = sum(history.refusal is None for history in load.histories)
    return answered / (loop.time() - begun_s)


async def _open_loop(stage: Stage, cluster: Cluster, per_s: float) -> float:
    """Good answers a second."""
    loop = asyncio.get_running_loop()
    cases = make_cases(stage.rng.getrandbits(32), int(per_s * SECONDS), **LENGTHS)
    ends: Counter[str] = Counter()
    histories: list[History] = []
    async with BatonClient(cluster.grpc) as client:

        async def one(number: int) -> None:
            await asyncio.sleep(number / per_s)
            begun_s = loop.time()
            history = await watch(client, cases[number])
            if isinstance(history.refusal, Overloaded):
                ends["refused"] += 1
                stage.figures.sample("refusal_s", loop.time() - begun_s)
            else:
                histories.append(history)

        begun_s = loop.time()
        await asyncio.gather(*(one(number) for number in range(len(cases))))
        spent_s = loop.time() - begun_s
    stage.judge(histories, f"{per_s:.0f} requests/s")
    stage.figures.counts["refused"] += ends["refused"]
    return sum(history.refusal is None for history in histories) / spent_s
