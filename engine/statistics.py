"""What an engine tells about itself: one frozen snapshot."""

from dataclasses import dataclass

from common.types import BlockCounts
from engine.speculation.statistics import SpeculationStatistics


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Gauges of now, then counters since the start. ``num_importing`` counts copies under way or
    quarantined; ``prefix_queries`` are admissions of new work, ``prefix_hits`` those that found
    cached blocks, ``prefix_hit_tokens`` the tokens that need not be computed for that;
    ``ledger_faults`` are checks that found the pool's books wrong (0, or we have a bug);
    ``speculation`` None: it is off."""

    num_running: int
    num_waiting: int
    num_importing: int
    num_leased: int
    blocks: BlockCounts
    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_output_tokens: int
    num_failed: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prefix_evictions: int
    ledger_faults: int
    speculation: SpeculationStatistics | None = None
