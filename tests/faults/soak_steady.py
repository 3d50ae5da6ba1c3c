"""An hour of light load without a fault: memory and descriptors of each process, minute by minute.

The first quarter is warm-up. What counts is how far the last minute lies above it.
"""

import asyncio

import psutil
from faults.figures import GOALS
from faults.load import Load
from faults.soak_kills import until_clean
from faults.stage import Stage
from support.cluster import Cluster, baton_up

GOAL = GOALS["steady"][1]
MINUTE_S = 60.0
FLAGS = ["--num-blocks", "128", "--step-delay-ms", "2"]
# A connection or two may be on its way.
SPARE_FDS = 4


async def steady(stage: Stage) -> None:
    if not stage.goes_on("minutes", GOAL):
        return
    async with baton_up(stage.folder, flags=FLAGS) as cluster, asyncio.TaskGroup() as group:
        history: list[dict[str, tuple[float, int]]] = []
        seeds = iter(range(stage.seed, stage.seed + 1_000_000))
        while stage.goes_on("minutes", GOAL):
            load = Load(num_clients=2, pause_s=1.0)
            async with load.on([cluster.grpc], next(seeds)):
                await asyncio.sleep(MINUTE_S)
            # In a thread: it takes a second or two.
            group.create_task(asyncio.to_thread(stage.judge, load.histories, "steady"))
            stage.figures.counts["minutes"] += 1
            history.append(_sizes(cluster))
        await until_clean(stage, cluster)
        _compare(stage, history)


def _compare(stage: Stage, history: list[dict[str, tuple[float, int]]]) -> None:
    first, last = history[len(history) // 4], history[-1]
    for role, (size, num_fds) in last.items():
        stage.figures.sample(f"memory of {role} MiB", size - first[role][0])
        more = num_fds - first[role][1]
        stage.figures.counts["descriptors left"] += more if more > SPARE_FDS else 0


def _sizes(cluster: Cluster) -> dict[str, tuple[float, int]]:
    """Resident MiB and descriptors, by role."""
    processes = {process.role: psutil.Process(process.pid) for process in cluster.processes}
    return {
        role: (process.memory_info().rss / (1 << 20), process.num_fds())
        for role, process in processes.items()
    }
