"""Everything restarted, one process after the other, under load: no request may fail.

Two gateways; a client that one of them refuses before the first token asks the other.
"""

import signal

from faults.figures import GOALS
from faults.load import Load
from faults.soak_kills import until_clean
from faults.stage import Stage
from support.cluster import Cluster, Process, baton_up

GOAL = GOALS["rolling"][1]
FLAGS = ["--num-blocks", "256", "--step-delay-ms", "2", "--lease-s", "3", "--gateways", "2",
         "--drain-budget-s", "10"]  # fmt: skip


async def rolling(stage: Stage) -> None:
    async with baton_up(stage.folder, prefill=2, decode=2, flags=FLAGS) as cluster:
        while stage.goes_on("rounds", GOAL):
            load = Load(num_clients=8, patience_s=20.0)
            async with load.on(cluster.gateways, stage.rng.getrandbits(32)):
                await load.until_more(8)
                for process in cluster.processes:
                    await _restart(stage, cluster, process)
                cluster.child("nats-server").kill()
                await load.until_more(24)
            stage.judge(load.histories, "rolling restart")
            failed = sum(history.refusal is not None for history in load.histories)
            stage.figures.counts["lost"] += failed
            stage.figures.counts["rounds"] += 1
        await until_clean(stage, cluster)


async def _restart(stage: Stage, cluster: Cluster, process: Process) -> None:
    process.kill(signal.SIGTERM)
    await cluster.until_back(process)
    stage.figures.counts["restarts"] += 1
