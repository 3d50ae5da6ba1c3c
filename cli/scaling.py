"""Pools of a running `baton up` that grow and shrink.

A change in order:

1. the workers that are missing start, all at once, and every gateway knows them;
2. those that are too many, the latest of their pool, drain: no intake, finish or hand over, leave;
3. each step is told to whoever asked, who may have gone: the change goes on without them.

One change at a time. A start that fails ends the change before anything is drained.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cli.child import Child, ChildSpec
from cli.launch_plan import MAX_POOL, Pools
from cli.supervisor import Supervisor
from common.errors import ConfigError, InvalidRequest, Unavailable
from common.wire import supervisor as wire

SCALABLE = ("prefill", "decode")
_NUM_THREADS = "OMP_NUM_THREADS"
Tell = Callable[[wire.ScaleResponse], None]


class MakeWorker(Protocol):
    """What to start for a pool's worker: see `LaunchPlan.worker`."""

    def __call__(self, pool: str, index: int, num_threads: int) -> ChildSpec: ...


@dataclass(frozen=True, slots=True)
class _Plan:
    missing: Sequence[ChildSpec]
    leaving: Sequence[Child]


class Scaler:
    def __init__(self, supervisor: Supervisor, make_worker: MakeWorker) -> None:
        self._supervisor = supervisor
        self._make_worker = make_worker
        self._next_index: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    async def scale(self, wanted: Mapping[str, int]) -> AsyncGenerator[wire.ScaleResponse, None]:
        """Until all pools of ``wanted`` have the size given. Raises InvalidRequest, Unavailable
        when another change is under way, or what a worker's start raises."""
        if self._task is not None and not self._task.done():
            raise Unavailable("the pools are being changed already; try again when that is done")
        plan = self._plan(wanted)
        told: asyncio.Queue[wire.ScaleResponse | None] = asyncio.Queue()
        self._task = task = asyncio.create_task(self._scale(plan, told.put_nowait), name="scale")
        task.add_done_callback(lambda _: told.put_nowait(None))
        while (response := await told.get()) is not None:
            yield response
        task.result()

    async def close(self) -> None:
        """After the supervisor has stopped: what is under way ends with its workers."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def _plan(self, wanted: Mapping[str, int]) -> _Plan:
        children = self._supervisor.worker_children
        pools = {pool: [c for c in children if c.spec.pool == pool] for pool in SCALABLE}
        sizes = {pool: wanted.get(pool, len(pools[pool])) for pool in SCALABLE}
        others = len(children) - sum(map(len, pools.values()))
        _check(sizes, others)
        leaving = [child for pool in SCALABLE for child in pools[pool][sizes[pool] :]]
        missing = [pool for pool in SCALABLE for _ in range(sizes[pool] - len(pools[pool]))]
        staying = [child for child in children if child not in leaving]
        num_threads = threads_left(staying, len(missing))
        return _Plan([self._new(pool, num_threads) for pool in missing], leaving)

    def _new(self, pool: str, num_threads: int) -> ChildSpec:
        """Never with a label that was there before: its log is still of use."""
        taken = [c.spec.index for c in self._supervisor.worker_children if c.spec.pool == pool]
        index = max(self._next_index.get(pool, 0), *(i + 1 for i in taken), 0)
        self._next_index[pool] = index + 1
        return self._make_worker(pool, index, num_threads)

    async def _scale(self, plan: _Plan, tell: Tell) -> None:
        await _all([self._start(spec, tell) for spec in plan.missing])
        await _all([self._drain(child, tell) for child in plan.leaving])

    async def _start(self, spec: ChildSpec, tell: Tell) -> None:
        tell(wire.ScaleResponse(change=wire.ScaleResponse.CHANGE_STARTING, label=spec.label))
        ready = await self._supervisor.add(spec)
        started = wire.ScaleResponse.CHANGE_STARTED
        tell(wire.ScaleResponse(change=started, label=spec.label, worker_id=ready.id))

    async def _drain(self, child: Child, tell: Tell) -> None:
        label, worker_id = child.spec.label, child.ready.id if child.ready else ""
        draining = wire.ScaleResponse.CHANGE_DRAINING
        tell(wire.ScaleResponse(change=draining, label=label, worker_id=worker_id))
        status = await self._supervisor.drain(child)
        tell(
            wire.ScaleResponse(
                change=wire.ScaleResponse.CHANGE_DRAINED,
                label=label,
                worker_id=worker_id,
                exit_status=status,
            )
        )


async def _all(work: Sequence[Awaitable[None]]) -> None:
    """To the end of each, also when one fails: then raises what the first of them raised."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if result is not None:
            raise result


def _check(sizes: Mapping[str, int], num_colocated: int) -> None:
    for pool, size in sizes.items():
        if size > MAX_POOL:
            raise InvalidRequest(pool, f"at most {MAX_POOL} workers")
    try:
        Pools(sizes["prefill"], sizes["decode"], num_colocated, gateways=1).check()
    except ConfigError as error:
        raise InvalidRequest(error.setting, error.message.partition(": ")[2]) from None


def threads_left(staying: Sequence[Child], num_missing: int) -> int:
    """Those that stay keep their threads; the new ones share the cores that are left."""
    used = sum(int(child.spec.environment[_NUM_THREADS]) for child in staying)
    left = len(os.sched_getaffinity(0)) - used
    return max(1, left // max(1, num_missing))
