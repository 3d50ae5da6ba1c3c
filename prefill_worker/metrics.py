"""What a prefill worker exports beyond worker/metrics.py: its jobs, its offers and their leases."""

from kv_transfer.exports import ExportStatistics
from prefill_worker.statistics import PrefillStatistics
from worker.metrics import StepMeter, worker_exposition
from worker.report import WorkerFacts


def exposition(facts: WorkerFacts, statistics: PrefillStatistics, meter: StepMeter) -> str:
    out = worker_exposition(facts, statistics.state, statistics.engine, meter)
    out.gauge("baton_jobs", "jobs owned or asked for", statistics.jobs)
    out.gauge("baton_free_slots", "jobs that it would take now", statistics.free_slots)
    out.counters(
        "baton_jobs_ended",
        "jobs by what became of them",
        ("outcome",),
        {
            "refused": statistics.refused,
            "succeeded": statistics.succeeded,
            "failed": statistics.failed,
            "cancelled": statistics.cancelled,
            "dropped": statistics.dropped,
            "malformed": statistics.malformed,
        },
    )
    exports: ExportStatistics = statistics.exports
    leases = exports.leases
    out.gauges(
        "baton_leases",
        "leases open now",
        ("state",),
        {"offered": leases.offered, "claimed": leases.claimed},
    )
    out.counter("baton_leases_offered", "leases ever offered", leases.num_offered)
    out.counter("baton_leases_claimed", "leases ever claimed", leases.num_claimed)
    out.counters(
        "baton_leases_ended",
        "leases by how they ended",
        ("outcome",),
        {
            "settled": leases.num_settled,
            "expired": leases.num_expired,
            "released": leases.num_released,
        },
    )
    out.counters(
        "baton_lease_refusals",
        "calls on leases that were refused",
        ("operation", "verdict"),
        {(operation, verdict.value): n for (operation, verdict), n in leases.refused.items()},
    )
    out.counters("baton_transfer_sent_bytes", "KV handed over", ("transport",), exports.num_bytes)
    out.counters(
        "baton_transfer_sent_blocks", "KV blocks handed over", ("transport",), exports.num_blocks
    )
    out.counter("baton_transfer_strangers", "turned away at data ports", exports.num_strangers)
    return out.text()
