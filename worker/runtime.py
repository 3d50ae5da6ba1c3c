"""Puts the compute side of a worker together.

model facts -> number of blocks -> pool memory -> runner (oracle, null or torch) -> block pool ->
speculator, if it is to draft -> engine, whose loop a worker starts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.config import DecodeSettings, WorkerSettings
from engine.block_pool import BlockPool
from engine.block_tables import AllocatorKind
from engine.device_runner import DeviceRunner
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
from kv_transfer.cuda.device import open_device
from kv_transfer.memory import PoolMemory, allocate_pool, sweep_dead_pools
from kv_transfer.registry import pool_kind
from worker.gpu import STEP_TOKENS, load_on_gpu
from worker.identity import WorkerIdentity
from worker.model import ModelFacts, model_facts, num_pool_blocks
from worker.speculation import make_speculator

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
    on_gpu = load_on_gpu(settings, model)
    num_blocks = num_pool_blocks(settings, model) if on_gpu is None else on_gpu.num_blocks
    kind = pool_kind(settings.transport, settings.device)
    if kind == "shm":
        sweep_dead_pools(settings.pool_dir)
    memory = allocate_pool(
        kind,
        model.layout,
        num_blocks + 1,
        settings.pool_dir,
        identity.worker_id,
        identity.epoch,
        open_device(settings.device) if kind == "cuda" else None,
    )
    try:
        runner = None if on_gpu is None else on_gpu.loaded.runner(memory.tensor)
        engine = make_engine(settings, model, memory, runner=runner)
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
    runner: ModelRunner | None = None,
) -> Engine:
    """``clock`` and ``sleep`` are the engine thread's; a simulation gives its own. ``runner``: that
    of a model loaded before its pool, on a GPU."""
    on_free = None
    if runner is None:
        pace = Pace(settings.step_delay_ms / 1e3, clock, sleep, settings.token_delay_us / 1e6)
        runner, on_free = _make_runner(settings, model, memory, pace)
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
        async_depth=async_depth(settings),
    )
    speculator = None
    if isinstance(settings, DecodeSettings):
        speculator = make_speculator(settings, model, runner, pool, clock)
    if isinstance(runner, TorchRunner) and runner.kernels_name == "numba":
        # Its team has this worker's cores: torch's own threads would spin on them.
        torch.set_num_threads(1)
    raises_on_fault = settings.on_ledger_fault == "raise"
    guarded = RowGuard(runner, scheduler.async_depth)
    return Engine(guarded, pool, scheduler, clock, raises_on_fault, speculator)


def _make_runner(
    settings: WorkerSettings, model: ModelFacts, memory: PoolMemory, pace: Pace
) -> tuple[ModelRunner, Callable[[Sequence[int]], None] | None]:
    """The second is told of blocks that become free."""
    if model.entry is not None:
        config = RunnerConfig(
            settings.dtype, settings.device, settings.kernels, settings.quantization
        )
        return build_runner(config, model.entry.directory, memory.tensor), None
    if settings.model == "oracle":
        oracle = OracleRunner(memory.tensor, model.description.vocab_size, pace)
        return oracle, oracle.poison
    return NullRunner(pace), None


def async_depth(settings: WorkerSettings) -> int:
    """A GPU computes a step while the host schedules the next; a CPU would only share its time."""
    if settings.async_depth is not None:
        return settings.async_depth
    return 1 if settings.device == "cuda" else 0


def _step_tokens(runner: ModelRunner, pool: BlockPool) -> int:
    """What a model without weights takes costs no time worth measuring."""
    if isinstance(runner, DeviceRunner):
        return STEP_TOKENS
    if not isinstance(runner, TorchRunner):
        return SchedulerConfig().max_num_batched_tokens
    return measured_step_budget(runner, pool.block_size, pool.num_total + 1)
