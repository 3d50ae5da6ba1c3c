"""One bit flipped in a transfer, anywhere: in a block's bytes or in its checksum, over shm and tcp.

Each flip must be found before the block is used: the answer is right, and the decode worker counted
a lost KV. As many transfers without a flip must raise no alarm.
"""

from faults.figures import GOALS
from faults.history import watch
from faults.soak_kills import until_clean
from faults.stage import Stage
from support.cluster import Cluster, baton_up
from support.oracle_requests import make_cases

from common.client import BatonClient

GOAL = GOALS["flips"][1]
FLAGS = ["--num-blocks", "512", "--step-delay-ms", "0", "--lease-s", "3", "--allow-failpoints"]
PLACES = ("transfer.corrupt_block", "transfer.corrupt_checksum")


async def flips(stage: Stage) -> None:
    for transport in ("shm", "tcp"):
        flags = [*FLAGS, "--transport", transport]
        folder = stage.folder / transport
        folder.mkdir()
        async with baton_up(folder, flags=flags) as cluster, BatonClient(cluster.grpc) as client:
            for _ in range(GOAL // 2):
                if not stage.goes_on("flips", GOAL):
                    break
                await _pair(stage, cluster, client, transport)
            await until_clean(stage, cluster)


async def _pair(stage: Stage, cluster: Cluster, client: BatonClient, transport: str) -> None:
    """One transfer with a flipped bit, one without."""
    counts, rng = stage.figures.counts, stage.rng
    (decode,) = cluster.of_role("decode")
    flipped, healthy = make_cases(rng.getrandbits(32), 2, (16, 300), (4, 8))
    place = rng.choice(PLACES)
    before = await _lost(cluster)
    await cluster.arm(decode, f"{place}=corrupt@{rng.randint(1, flipped.num_prompt_blocks)}")
    history = await watch(client, flipped)
    await cluster.arm(decode, "")
    stage.judge([history], f"{place} over {transport}")
    found = await _lost(cluster) - before
    counts["flips"] += 1
    counts["found"] += found
    if found != 1:
        counts["undetected"] += 1
        stage.figures.example(f"seed {stage.seed}: {place} over {transport}: found {found}")
    stage.judge([await watch(client, healthy)], f"no flip over {transport}")
    counts["healthy transfers"] += 1
    counts["false_alarms"] += await _lost(cluster) - before - found


async def _lost(cluster: Cluster) -> int:
    (decode,) = cluster.of_role("decode")
    return int((await cluster.debug(decode, "statistics"))["kv_lost"])
