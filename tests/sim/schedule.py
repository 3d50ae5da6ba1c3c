"""One seeded schedule: a cluster, requests, faults, and what must hold at every moment and after.

I1: every request ends once, indices 0..n-1 each once, the text is the oracle's.
I4: on every worker the conservation sum holds at every moment; when idle nothing is held.
I5: what is stale changes nothing (it would change a text, an index or a ledger).
And where nothing went wrong nobody waits: a wake-up that is lost is healed by some timer.
"""

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import lru_cache

from sim import clock
from sim.cluster import VOCAB, Node, SimCluster, make_cluster
from sim.network import Faults

from common.errors import BatonError, InternalError, Unavailable
from common.types import Role, SamplingParams
from decode_worker.reservations import ReservationStatistics
from decode_worker.worker import DecodeWorker
from engine.oracle import reference_ids
from gateway.gateway import Gateway
from gateway.request import Completed, Request

LIMIT_S = 2000.0
PATIENCE_S = 200.0
# Twenty times the longest answer of a healthy cluster; no timer of the protocol is as short.
HEALTHY_S = 1.0


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Outcome:
    ids: tuple[int, ...]
    completed: Completed | None
    error: BatonError | None
    cancelled: bool
    seconds: float


def run_schedule(seed: int) -> None:
    """Raises Violation, with the seed in its text."""
    try:
        clock.run(_schedule(random.Random(seed)), LIMIT_S)
    except (AssertionError, TimeoutError) as error:
        raise Violation(f"seed {seed}: {type(error).__name__}: {error}") from error


async def _schedule(rng: random.Random) -> None:
    crashes: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: crashes.append(f"{context['message']}: {context.get('exception')!r}")
    )
    bad = rng.random() < 0.7
    faults = Faults(
        lose=rng.choice((0.0, 0.01, 0.05, 0.25)) if bad else 0.0,
        double=rng.choice((0.0, 0.02, 0.1)) if bad else 0.0,
        delay=rng.choice((0.0, 0.02, 0.1)) if bad else 0.0,
    )
    cluster = make_cluster(rng, faults, rng.choice((10, 14, 24)), check_node)
    try:
        await _run(rng, cluster)
    finally:
        await cluster.close()
    if crashes:
        raise Violation(crashes[0])


async def _run(rng: random.Random, cluster: SimCluster) -> None:
    for _ in range(rng.choice((1, 1, 2))):
        await cluster.start_gateway()
    for role in (Role.PREFILL, Role.DECODE):
        for _ in range(rng.choice((1, 2))):
            await cluster.start_worker(role)
    await asyncio.wait_for(until_ready(cluster), 30.0)
    num_kills = rng.choice((0, 0, 1, 1, 2))
    chaos = asyncio.ensure_future(_chaos(rng, cluster, num_kills))
    try:
        requests = [_request(rng, number) for number in range(rng.choice((2, 4, 6)))]
        outcomes = await asyncio.gather(
            *(_client(rng, rng.choice(cluster.gateways)[1], request) for request in requests)
        )
        await chaos
        # A link that breaks, or reports that are lost in a row, look like a worker that died; two
        # of those end a request.
        faults = cluster.network.faults
        allowed: tuple[type[BatonError], ...] = ()
        if cluster.num_breaks or faults != Faults():
            allowed = (Unavailable,)
        if cluster.num_breaks >= 2 or faults.lose > 0.1:
            allowed = (Unavailable, InternalError)
        healthy = faults == Faults() and not cluster.num_breaks
        for request, outcome in zip(requests, outcomes, strict=True):
            _judge(request, outcome, allowed)
            if healthy and not outcome.cancelled and outcome.seconds > HEALTHY_S:
                raise Violation(f"{request.request_id} took {outcome.seconds:.2f} s")
        await until_idle(cluster)
        if cluster.wrong:
            raise Violation(cluster.wrong[0])
    finally:
        chaos.cancel()
        await asyncio.gather(chaos, return_exceptions=True)


async def until_ready(cluster: SimCluster) -> None:
    for _, gateway in cluster.gateways:
        while not gateway.ready:
            await asyncio.sleep(0.05)


# ---------------------------------------------------------------- requests


def _request(rng: random.Random, number: int) -> Request:
    shared = number % 2 == 0
    length = rng.choice((1, 3, 4, 5, 8, 9, 13))
    prompt = tuple((7 * i + (0 if shared else number)) % VOCAB for i in range(length))
    params = SamplingParams(
        max_tokens=rng.choice((1, 2, 3, 7, 10)),
        seed=number % 3,
        temperature=rng.choice((0.0, 0.8)),
        stop_token_ids=(3,) if rng.random() < 0.3 else (),
    )
    return Request(f"r{number}", "", prompt, params, timeout_s=PATIENCE_S / 2)


async def _client(rng: random.Random, gateway: Gateway, request: Request) -> Outcome:
    """Reads the whole answer, or leaves at some moment."""
    await asyncio.sleep(rng.uniform(0.0, 0.5))
    leaves_s = rng.choice((None, None, None, rng.uniform(0.0, 0.2), rng.uniform(0.0, 8.0)))
    clock = asyncio.get_running_loop().time
    begun_s = clock()
    ids: list[int] = []
    completed: list[Completed] = []

    async def read() -> None:
        async with aclosing(gateway.pipeline.generate(request, {})) as events:
            async for event in events:
                if isinstance(event, Completed):
                    completed.append(event)
                    continue
                if completed or event.index != len(ids):
                    raise Violation(f"{request.request_id}: index {event.index} at {len(ids)}")
                ids.extend(event.token_ids)

    error: BatonError | None = None
    cancelled = False
    try:
        async with asyncio.timeout(leaves_s):
            await read()
    except TimeoutError:
        cancelled = True
    except BatonError as raised:
        error = raised
    if len(completed) > 1:
        raise Violation(f"{request.request_id} ended twice")
    completion = completed[0] if completed else None
    return Outcome(tuple(ids), completion, error, cancelled, clock() - begun_s)


@lru_cache(maxsize=4096)
def _reference(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    return tuple(reference_ids(prompt, params, VOCAB))


def _judge(request: Request, outcome: Outcome, allowed: tuple[type[BatonError], ...]) -> None:
    longest = replace(request.params, max_tokens=10)
    right = _reference(request.prompt_ids, longest)[: request.params.max_tokens]
    if outcome.ids != right[: len(outcome.ids)]:
        raise Violation(f"{request.request_id}: {outcome.ids} instead of {right}")
    if outcome.cancelled:
        return
    if outcome.completed is not None:
        if outcome.ids != right:
            raise Violation(f"{request.request_id} ended early: {outcome.ids} of {right}")
        usage = outcome.completed.usage
        num_prompt = len(request.prompt_ids)
        if usage.output_tokens != len(right) or usage.prompt_tokens != num_prompt:
            raise Violation(f"{request.request_id}: {usage}")
        on_prefill = usage.prefill_computed + usage.prefill_cached
        on_decode = usage.decode_cached + usage.decode_transferred + usage.decode_computed
        if on_prefill != num_prompt and (on_prefill or on_decode != num_prompt):
            raise Violation(f"{request.request_id}: {usage}")
        return
    if not isinstance(outcome.error, allowed):
        raise Violation(f"{request.request_id}: {outcome.error!r}")


# ---------------------------------------------------------------- faults and invariants


async def _chaos(rng: random.Random, cluster: SimCluster, num_kills: int) -> None:
    for _ in range(num_kills):
        await asyncio.sleep(rng.uniform(0.0, 1.5))
        name = rng.choice(list(cluster.nodes))
        role = Role.DECODE if isinstance(cluster.nodes[name].worker, DecodeWorker) else Role.PREFILL
        await cluster.kill(name)
        cluster.num_breaks += 1
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        await cluster.start_worker(role)
    if rng.random() < 0.2:
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        cluster.num_breaks += 1
        cluster.network.break_streams(rng.choice(cluster.gateways)[0])


def check_node(node: Node) -> str:
    """What is wrong on this worker at this moment, if anything. Called between its steps."""
    counts = node.engine._pool.counts()  # `statistics` makes much else, at every step
    total = counts.free + counts.cached + counts.in_use + counts.leased + counts.importing
    if total != counts.total:
        return f"{node.host.name}: {counts}"
    if isinstance(node.worker, DecodeWorker):
        promises = _promises(node.worker)
        if promises.promised_blocks > promises.limit_blocks:
            return f"{node.host.name}: {promises}"
    return ""


def _promises(worker: DecodeWorker) -> ReservationStatistics:
    return worker._promises.statistics()


async def until_idle(cluster: SimCluster) -> None:
    """Two leases after the last request, every ledger is back at its start."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 40.0
    left = "?"
    while loop.time() < end_s:
        left = _held(cluster)
        if not left:
            return
        await asyncio.sleep(0.1)
    raise Violation(f"still held: {left}")


def _is_in_step(gateway: Gateway, node: Node) -> bool:
    """The gateway's index has exactly the keys that the worker's engine has."""
    name = node.host.name
    cache = gateway.prefix_index._caches.get(name)
    in_step = cache is not None and cache.in_step and cache.keys == set(node.engine.cached_keys())
    return in_step and name in gateway.registry.entries


def _held(cluster: SimCluster) -> str:
    for host, gateway in cluster.gateways:
        for node in cluster.nodes.values():
            if not _is_in_step(gateway, node):
                return f"{host.name} does not know what {node.host.name} has cached"
            if gateway.registry.queued_tokens(gateway.registry.entries[node.host.name]):
                return f"{host.name} believes that {node.host.name} is loaded"
        if gateway.runs.by_id or gateway.statistics().num_waiting:
            return f"requests of {gateway.settings.gateway_id}"
    for node in cluster.nodes.values():
        counts = node.engine._pool.counts()
        if counts.in_use or counts.leased or counts.importing:
            return f"{node.host.name}: {counts}"
        if isinstance(node.worker, DecodeWorker):
            promises = _promises(node.worker)
            if promises.promises or promises.waiting:
                return f"{node.host.name}: {promises}"
    return ""
