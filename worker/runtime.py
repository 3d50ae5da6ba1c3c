"""Puts the compute side of a worker together.

model facts -> number of blocks -> pool memory -> runner (oracle, null or torch) -> block pool ->
engine, whose loop a worker starts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.config import WorkerSettings
from engine.block_pool import BlockPool
from engine.block_tables import AllocatorKind
from engine.engine import Engine
from engine.loop import EngineRuntime, OnEvents
from engine.model_runner import RunnerConfig, TorchRunner, build_runner
from engine.null_runner import NullRunner
from engine.oracle import OracleRunner
from engine.pace import Pace
from engine.prefix_cache import PrefixCache
from engine.row_guard import RowGuard
from engine.runner import ModelRunner
from engine.scheduler import SchedulerConfig
from engine.step_budget import measured_step_budget
from kv_transfer.memory import PoolMemory, allocate_pool, sweep_dead_pools
from kv_transfer.registry import pool_kind
from worker.identity import WorkerIdentity
from worker.model import ModelFacts, model_facts, num_pool_blocks

# Gives an engine's runtime its listener.
MakeRuntime = Callable[[OnEvents], EngineRuntime]


@dataclass(frozen=True, slots=True)
class Compute:
    """``memory`` is to be closed once nothing uses the engine any more."""

    model: ModelFacts
    num_blocks: int
    memory: PoolMemory
    engine: Engine


def assemble(settings: WorkerSettings, identity: WorkerIdentity) -> Compute:
    """Loads the model and takes the pool's memory; blocking. Raises ConfigError, ModelError."""
    model = model_facts(settings)
    num_blocks = num_pool_blocks(settings, model)
    kind = pool_kind(settings.transport)
    if kind == "shm":
        sweep_dead_pools(settings.pool_dir)
    memory = allocate_pool(
        kind,
        model.layout,
        num_blocks + 1,
        settings.pool_dir,
        identity.worker_id,
        identity.epoch,
    )
    try:
        engine = make_engine(settings, model, memory)
    except BaseException:
        memory.close()
        raise
    return Compute(model, num_blocks, memory, engine)


def make_engine(
    settings: WorkerSettings,
    model: ModelFacts,
    memory: PoolMemory,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Engine:
    """``clock`` and ``sleep`` are the engine thread's; a simulation gives its own."""
    runner: ModelRunner
    on_free: Callable[[Sequence[int]], None] | None = None
    pace = Pace(settings.step_delay_ms / 1000, clock, sleep)
    if model.entry is not None:
        config = RunnerConfig(settings.dtype, settings.device, settings.kernels)
        runner = build_runner(config, model.entry.directory, memory.tensor)
    elif settings.model == "oracle":
        runner = oracle = OracleRunner(memory.tensor, model.description.vocab_size, pace)
        on_free = oracle.poison
    else:
        runner = NullRunner(pace)
    pool = BlockPool(
        memory.num_blocks,
        settings.block_size,
        fingerprint=model.description.fingerprint,
        prefix=PrefixCache(memory.num_blocks) if settings.enable_prefix_caching else None,
        on_free=on_free,
        clock=clock,
    )
    scheduler = SchedulerConfig(
        max_num_batched_tokens=settings.max_num_batched_tokens or _step_tokens(runner, pool),
        max_num_seqs=settings.max_num_seqs,
        max_model_len=model.description.max_model_len,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        max_num_partial_prefills=settings.max_num_partial_prefills,
        allocator=AllocatorKind(settings.allocator),
        async_depth=settings.async_depth or 0,
    )
    raises_on_fault = settings.on_ledger_fault == "raise"
    guarded = RowGuard(runner, scheduler.async_depth)
    return Engine(guarded, pool, scheduler, clock, raises_on_fault)


def _step_tokens(runner: ModelRunner, pool: BlockPool) -> int:
    """What a model without weights takes costs no time worth measuring."""
    if not isinstance(runner, TorchRunner):
        return SchedulerConfig().max_num_batched_tokens
    return measured_step_budget(runner, pool.block_size, pool.num_total + 1)
