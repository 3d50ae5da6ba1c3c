"""What a decode worker exports beyond worker/metrics.py: promises, sequences and fetches."""

from common.metrics import Exposition
from decode_worker.reservations import ReservationStatistics
from decode_worker.statistics import DecodeStatistics
from kv_transfer.imports import ImportStatistics
from worker.metrics import StepMeter, worker_exposition
from worker.report import WorkerFacts


def exposition(facts: WorkerFacts, statistics: DecodeStatistics, meter: StepMeter) -> str:
    out = worker_exposition(facts, statistics.state, statistics.engine, meter)
    out.gauge("baton_streams", "streams of gateways", statistics.streams)
    out.gauge("baton_outbox_bytes", "tokens not yet sent", statistics.outbox_bytes)
    out.gauge("baton_sequences", "sequences from Start to end", statistics.sequences)
    out.counters(
        "baton_sequences_ended",
        "sequences by how they ended",
        ("outcome",),
        {
            "finished": statistics.finished,
            "aborted": statistics.aborted,
            "kv_lost": statistics.kv_lost,
            "failed": statistics.failed,
        },
    )
    out.counter("baton_fenced", "messages of an attempt that is over", statistics.fenced)
    _add_reservations(out, statistics.reservations)
    _add_imports(out, statistics.imports)
    return out.text()


def _add_reservations(out: Exposition, reservations: ReservationStatistics) -> None:
    out.gauge("baton_promised_blocks", "KV blocks promised", reservations.promised_blocks)
    out.gauge("baton_promise_limit_blocks", "KV blocks promised at most", reservations.limit_blocks)
    out.gauges(
        "baton_promises",
        "requests with a promise of room, and those that wait for one",
        ("state",),
        {"granted": reservations.promises, "waiting": reservations.waiting},
    )
    out.counters(
        "baton_promises_asked",
        "promises of room by what became of them",
        ("outcome",),
        {
            "granted": reservations.granted,
            "refused": reservations.refused,
            "stale": reservations.stale,
            "expired": reservations.expired,
        },
    )


def _add_imports(out: Exposition, imports: ImportStatistics) -> None:
    transport = ("transport",)
    out.gauge("baton_transfers_running", "fetches from claim to settle", imports.fetching)
    out.counter("baton_transfers", "fetches that settled", imports.num_fetches)
    out.counters("baton_transfer_bytes", "KV fetched", transport, imports.num_bytes)
    out.counters("baton_transfer_blocks", "KV blocks fetched", transport, imports.num_blocks)
    out.counters("baton_transfer_seconds", "time of the copies", transport, imports.seconds)
    out.counters(
        "baton_transfer_failures",
        "fetches that failed",
        ("transport", "reason"),
        imports.num_failures,
    )
