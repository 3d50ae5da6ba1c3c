"""Shifting chaos: every 10 s another random set of faults, a quarter of the time none, under load.

1. Clients ask all the time. A refusal is allowed while something is broken, a wrong, repeated or
   missing token never.
2. Each period the mix is drawn anew: a worker killed, frozen or cut off, NATS killed or frozen,
   messages lost or doubled, blocks corrupted.
3. At the end everything is healed, and asked once more: now all must be answered right, and every
   ledger must be empty.
"""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import psutil
from faults.figures import GOALS
from faults.load import Load
from faults.soak_kills import until_clean
from faults.stage import Stage
from support.cluster import Cluster, Process, baton_up
from support.cut_proxy import CutProxy, cut_proxy

from common.failpoints import OBEYED

GOAL = GOALS["chaos"][1]
PERIOD_S = 10.0
FLAGS = ["--num-blocks", "128", "--step-delay-ms", "2", "--lease-s", "3", "--chaos"]
Fault = Callable[[Cluster, random.Random], Awaitable[None]]


async def chaos(stage: Stage) -> None:
    async with (
        baton_up(stage.folder, prefill=2, decode=2, flags=FLAGS, allow_tracebacks=True) as cluster,
        cut_proxy() as one,
        cut_proxy() as other,
        cluster.another("prefill", *one.flags) as prefill,
        cluster.another("decode", *other.flags) as decode,
    ):
        faults = {**FAULTS, "workers cut off": partial(_cut, [one, other])}
        load = Load(num_clients=12)
        async with load.on([cluster.grpc], stage.seed):
            while stage.goes_on("periods", GOAL):
                await _period(stage, cluster, faults)
            await _heal(cluster)
            for worker in (prefill, decode):
                await cluster.until_known(worker.id)
        stage.judge(load.histories, "chaos")
        healed = Load(num_clients=8, patience_s=20.0)
        async with healed.on([cluster.grpc], stage.seed + 1):
            await healed.until_more(32)
        stage.judge(healed.histories, "healed")
        stage.figures.counts["lost"] += sum(h.refusal is not None for h in healed.histories)
        await until_clean(stage, cluster, prefill, decode)


async def _period(stage: Stage, cluster: Cluster, faults: Mapping[str, Fault]) -> None:
    counts = stage.figures.counts
    counts["periods"] += 1
    names = stage.rng.sample(sorted(faults), stage.rng.choice([0, 1, 1, 2]))
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(PERIOD_S))
        for name in names:
            counts[name] += 1
            fault = faults[name](cluster, random.Random(stage.rng.getrandbits(64)))
            group.create_task(_do(fault))
    counts["quiet periods"] += not names


async def _do(fault: Awaitable[None]) -> None:
    # The victim may have died of the fault before it and not be back yet.
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        await fault


async def _heal(cluster: Cluster) -> None:
    for process in cluster.processes:
        await _arm(cluster, process, "")
    for process in cluster.processes:
        if not psutil.pid_exists(process.pid):
            await cluster.until_back(process)


async def _arm(cluster: Cluster, process: Process, spec: str) -> None:
    try:
        await cluster.arm(process, spec)
    except OSError:
        return  # it is not there at the moment


def _worker(cluster: Cluster, rng: random.Random) -> Process:
    return rng.choice(cluster.workers)


async def _kill(cluster: Cluster, rng: random.Random) -> None:
    await asyncio.sleep(rng.uniform(0, 5))
    _worker(cluster, rng).kill()


async def _freeze(cluster: Cluster, rng: random.Random) -> None:
    process = _worker(cluster, rng)
    process.kill(signal.SIGSTOP)
    try:
        await asyncio.sleep(rng.choice([1.0, 6.0]))
    finally:
        with suppress(ProcessLookupError):
            process.kill(signal.SIGCONT)


async def _cut(proxies: Sequence[CutProxy], cluster: Cluster, rng: random.Random) -> None:
    """NATS still hears the worker, nobody reaches it."""
    proxy = rng.choice(proxies)
    proxy.cut()
    await asyncio.sleep(rng.uniform(1, 8))
    proxy.heal()


async def _kill_nats(cluster: Cluster, rng: random.Random) -> None:
    await asyncio.sleep(rng.uniform(0, 5))
    cluster.child("nats-server").kill()


async def _freeze_nats(cluster: Cluster, rng: random.Random) -> None:
    server = cluster.child("nats-server")
    server.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(rng.uniform(1, 8))
    finally:
        server.send_signal(signal.SIGCONT)


async def _messages(cluster: Cluster, rng: random.Random) -> None:
    """Lost, doubled and corrupted ones, and slow steps, in one process of each role."""
    for role in ("gateway", "prefill", "decode"):
        process = rng.choice(cluster.of_role(role))
        places = [place for place in OBEYED if _is_of(place, role)]
        chosen = rng.sample(places, 2)
        spec = ";".join(f"{p}={rng.choice(OBEYED[p])}@{rng.randint(1, 20)}" for p in chosen)
        await _arm(cluster, process, spec)


def _is_of(place: str, role: str) -> bool:
    owner = place.partition(".")[0]
    return owner == role or (owner, role) in (("export", "prefill"), ("transfer", "decode"))


FAULTS: dict[str, Fault] = {
    "workers killed": _kill,
    "workers frozen": _freeze,
    "nats killed": _kill_nats,
    "nats frozen": _freeze_nats,
    "messages lost": _messages,
}
