"""nats-server killed, its store wiped, and frozen for 10 s, under load.

Its jobs are in memory, so each kill is a wipe as well; what lies in its folder is deleted too.
"""

import asyncio
import shutil
import signal

from faults.figures import GOALS
from faults.load import Load
from faults.soak_kills import until_clean
from faults.stage import Stage
from support.cluster import Cluster, baton_up

GOAL_KILLS, GOAL_FREEZES = GOALS["nats"][1], 3
FROZEN_S = 10.0
FLAGS = ["--num-blocks", "256", "--step-delay-ms", "4", "--lease-s", "3"]


async def nats(stage: Stage) -> None:
    async with baton_up(stage.folder, prefill=2, decode=2, flags=FLAGS) as cluster:
        while stage.goes_on("kills", GOAL_KILLS):
            await _under_load(stage, cluster, "killed")
        while stage.goes_on("freezes", GOAL_FREEZES):
            await _under_load(stage, cluster, "frozen")
        await until_clean(stage, cluster)


async def _under_load(stage: Stage, cluster: Cluster, how: str) -> None:
    """A client that is refused meanwhile asks again; no request may end in any other way."""
    load = Load(num_clients=24, max_tokens=(100, 300), patience_s=30.0)
    async with load.on([cluster.grpc], stage.rng.getrandbits(32)):
        await asyncio.sleep(stage.rng.uniform(0.5, 1.5))
        server = cluster.child("nats-server")
        if how == "killed":
            for store in cluster.state_file.parent.glob("nats/jetstream"):
                shutil.rmtree(store, ignore_errors=True)
            server.kill()
            stage.figures.counts["kills"] += 1
        else:
            server.send_signal(signal.SIGSTOP)
            await asyncio.sleep(FROZEN_S)
            server.send_signal(signal.SIGCONT)
            stage.figures.counts["freezes"] += 1
        await load.until_more(16)
    stage.judge(load.histories, f"nats-server {how}")
    lost = [history for history in load.histories if history.refusal is not None]
    stage.figures.counts["lost"] += len(lost)
