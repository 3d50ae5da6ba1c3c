"""Workers killed at random points, hundreds of them, under load.

1. `baton up` gives a gateway and one worker of each role, which survive. Victims join beside them,
   forked ahead in the background (faults/zygote.py); each is killed once.
2. A round picks its victims and where they die: at a random hit of a random failpoint, or from
   outside after a random time. Then the load starts.
3. Who is still alive after `KILL_BY_S` is killed from outside. All victims of a round die before
   anyone could have moved a prefill job twice, so that no request meets two deaths by chance (it
   would rightly be refused as poison). The death of a decode worker is seen at once: one a round.
4. All requests must end right. At the end of the slice every ledger is empty.
"""

import asyncio
import random
from itertools import count
from pathlib import Path

from faults.figures import GOALS
from faults.history import watch
from faults.stage import Stage
from faults.zygote import Zygote, zygote
from support.cluster import Cluster, Process, baton_up
from support.oracle_requests import make_cases

from common.client import BatonClient

GOAL = GOALS["decode_kills"][1]
KILL_BY_S = 1.2
# Longer than a process may be silent before it is taken for dead.
DEAD_S = 4.0
NUM_REQUESTS = 16
FLAGS = ["--num-blocks", "128", "--step-delay-ms", "2", "--lease-s", "3", "--allow-failpoints"]

# Where a worker dies, and up to which hit of a round.
PREFILL_POINTS = {
    "prefill.after_pull": 3, "prefill.before_accept": 3, "prefill.after_accept": 3,
    "prefill.chunk": 6, "prefill.after_compute": 4, "prefill.before_ticket": 4,
    "prefill.after_ticket": 4,
}  # fmt: skip
DECODE_POINTS = {
    "decode.before_grant": 6, "decode.after_start": 6, "decode.before_claim": 6,
    "decode.after_claim": 6, "decode.copy_block": 30, "decode.before_settle": 6,
    "decode.after_settle": 6, "decode.before_send": 80, "decode.after_send": 80,
}  # fmt: skip


def is_dead(process: Process) -> bool:
    """It is a zombie: its parent waits for nobody."""
    stat = Path(f"/proc/{process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "Z"


class Victims:
    """Workers of one role, always some ready ahead."""

    def __init__(self, source: Zygote, num_ahead: int) -> None:
        self._source = source
        self._ready: asyncio.Queue[Process] = asyncio.Queue(num_ahead)
        self._task = asyncio.create_task(self._start_more())

    async def get(self) -> Process:
        getter = asyncio.ensure_future(self._ready.get())
        await asyncio.wait((getter, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not getter.done():
            getter.cancel()
            self._task.result()
        return await getter

    async def _start_more(self) -> None:
        while True:
            # Most room, so that work goes there.
            await self._ready.put(await self._source.spawn("--num-blocks", "512"))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def decode_kills(stage: Stage) -> None:
    await _kills(stage, "decode", DECODE_POINTS, num_at_once=1)


async def prefill_kills(stage: Stage) -> None:
    await _kills(stage, "prefill", PREFILL_POINTS, num_at_once=3)


async def _kills(stage: Stage, role: str, points: dict[str, int], num_at_once: int) -> None:
    async with baton_up(stage.folder, flags=FLAGS) as cluster, BatonClient(cluster.grpc) as client:
        async with zygote(cluster, role) as source:
            victims = Victims(source, num_at_once)
            try:
                for number in count():
                    if not stage.goes_on("kills", GOAL):
                        break
                    chosen = [await victims.get() for _ in range(num_at_once)]
                    await _round(stage, cluster, client, chosen, points, number)
                    for victim in chosen:
                        source.sweep(victim)
            finally:
                await victims.close()
        await asyncio.sleep(DEAD_S)
        for pool_file in cluster.pool_dir.glob("*"):
            if not any(worker.id in pool_file.name for worker in cluster.workers):
                pool_file.unlink()
        await until_clean(stage, cluster)


async def _round(
    stage: Stage,
    cluster: Cluster,
    client: BatonClient,
    victims: list[Process],
    points: dict[str, int],
    number: int,
) -> None:
    rng = random.Random(stage.rng.getrandbits(64))
    places = [await _arm(cluster, victim, points, rng) for victim in victims]
    cases = make_cases(rng.getrandbits(32), NUM_REQUESTS, (1, 200), (20, 60))
    killing = asyncio.gather(
        *(_kill(victim, place, rng) for victim, place in zip(victims, places, strict=True))
    )
    histories = await asyncio.gather(*(watch(client, case) for case in cases))
    for place in await killing:
        stage.figures.counts["kills"] += 1
        stage.figures.counts[f"kills at {place}"] += 1
    stage.judge(histories, f"round {number}, killed at {', '.join(places)}")


async def _arm(
    cluster: Cluster, victim: Process, points: dict[str, int], rng: random.Random
) -> str:
    """Where it is to die: a failpoint, or "any moment"."""
    place = rng.choice([*points, "any moment"])
    if place != "any moment":
        await cluster.arm(victim, f"{place}=kill@{rng.randint(1, points[place])}")
    return place


async def _kill(victim: Process, place: str, rng: random.Random) -> str:
    """Returns where it died."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + (rng.uniform(0.0, KILL_BY_S) if place == "any moment" else KILL_BY_S)
    while loop.time() < end_s:
        if is_dead(victim):
            return place
        await asyncio.sleep(0.01)
    victim.kill()
    return "any moment"


async def until_clean(stage: Stage, cluster: Cluster, *others: Process) -> None:
    """Also of ``others``, which `baton up` did not start."""
    try:
        await cluster.until_clean(others=others)
    except AssertionError as error:
        stage.figures.counts["leaked"] += 1
        stage.figures.example(f"seed {stage.seed}: {error}")
