"""What both kinds of worker export: the engine's statistics, and its steps as they come.

The engine imports no metrics: `StepMeter` counts the step records that it hands out anyway, a few
additions a step; all else is read from ``statistics()`` when Prometheus asks.
"""

from dataclasses import dataclass, field

from common.histogram import BATCH, ITERATION_TOKENS, STEP_S, Histogram
from common.metrics import Exposition
from common.types import KVLayout, StepRecord
from engine.flops import Cost, ModelCosts, decode_cost, prefill_cost
from engine.kernels import fallbacks
from engine.statistics import EngineStatistics
from worker.report import WorkerFacts, WorkerState


@dataclass(slots=True)
class StepMeter:
    """Sums over all steps since the start."""

    costs: ModelCosts
    seconds: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    tokens: Histogram = field(default_factory=lambda: Histogram(ITERATION_TOKENS))
    sequences: Histogram = field(default_factory=lambda: Histogram(BATCH))
    prefill: Cost = field(default_factory=Cost)
    decode: Cost = field(default_factory=Cost)

    def add(self, step: StepRecord) -> None:
        self.seconds.observe(step.end_s - step.start_s)
        num_decode_tokens = step.num_decode_tokens + step.num_draft_tokens
        self.tokens.observe(step.num_prefill_tokens + num_decode_tokens)
        self.sequences.observe(step.num_sequences)
        self.prefill += prefill_cost(self.costs, step)
        self.decode += decode_cost(self.costs, step)


def worker_exposition(
    facts: WorkerFacts, state: WorkerState, engine: EngineStatistics, meter: StepMeter
) -> Exposition:
    """The part that is the same for both roles."""
    out = Exposition(facts.model.name, facts.identity.role.value)
    out.gauge("baton_worker_ready", "1 while it takes work", float(state is WorkerState.READY))
    out.counters(
        "baton_kernel_fallbacks",
        "models served with plain torch because these kernels cannot",
        ("wanted",),
        {"triton": fallbacks["triton"], "numba": fallbacks["numba"]},
    )
    _add_engine(out, engine, facts.layout)
    _add_steps(out, engine, meter)
    return out


def _add_engine(out: Exposition, engine: EngineStatistics, layout: KVLayout) -> None:
    blocks = engine.blocks
    used = blocks.in_use + blocks.leased + blocks.importing
    out.gauge("vllm:num_requests_running", "sequences in the batch", engine.num_running)
    out.gauge("vllm:num_requests_waiting", "sequences that wait in the engine", engine.num_waiting)
    out.gauge("vllm:kv_cache_usage_perc", "share of KV blocks held, 0 to 1", used / blocks.total)
    out.gauges(
        "vllm:cache_config_info",
        "the KV pool, always 1",
        ("block_size", "num_gpu_blocks", "cache_dtype"),
        {(str(layout.block_size), str(blocks.total), layout.dtype): 1},
    )
    out.counter("vllm:prefix_cache_queries", "tokens looked up", engine.prefix_query_tokens)
    out.counter("vllm:prefix_cache_hits", "tokens found cached", engine.prefix_hit_tokens)
    out.counter("vllm:num_preemptions", "sequences put back for want of blocks", engine.preemptions)
    out.gauges(
        "baton_kv_blocks",
        "KV blocks, each counted in one state",
        ("state",),
        {
            "free": blocks.free,
            "cached": blocks.cached,
            "in_use": blocks.in_use,
            "leased": blocks.leased,
            "importing": blocks.importing,
        },
    )
    out.gauge("baton_kv_block_bytes", "size of a block", layout.block_bytes)
    out.counter("baton_prefix_evictions", "cached blocks given to others", engine.prefix_evictions)
    out.counter("baton_engine_failures", "sequences that the engine failed", engine.num_failed)
    out.counter("baton_ledger_faults", "times the pool's books were wrong", engine.ledger_faults)


def _add_steps(out: Exposition, engine: EngineStatistics, meter: StepMeter) -> None:
    phases = ("phase",)
    out.histogram("vllm:iteration_tokens_total", "tokens a step", meter.tokens)
    out.histogram("baton_step_seconds", "duration of a step", meter.seconds)
    out.histogram("baton_step_sequences", "sequences a step", meter.sequences)
    out.counters(
        "baton_tokens_computed",
        "tokens whose KV was computed",
        phases,
        {"prefill": engine.num_prefill_tokens, "decode": engine.num_decode_tokens},
    )
    out.counter("baton_tokens_sampled", "output tokens", engine.num_output_tokens)
    out.counters(
        "baton_flops",
        "floating point operations that the model's arithmetic needs",
        phases,
        {"prefill": meter.prefill.flops, "decode": meter.decode.flops},
    )
    out.counters(
        "baton_memory_bytes",
        "bytes of weights and KV that the model's arithmetic moves",
        phases,
        {"prefill": meter.prefill.num_bytes, "decode": meter.decode.num_bytes},
    )
