"""What a decode worker exports beyond worker/metrics.py: promises, sequences and fetches."""

from common.metrics import Exposition
from decode_worker.reservations import ReservationStatistics
from decode_worker.statistics import DecodeStatistics
from engine.speculation.statistics import SpeculationStatistics
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
    if statistics.engine.speculation is not None:
        _add_speculation(out, statistics.engine.speculation)
    _add_reservations(out, statistics.reservations)
    _add_imports(out, statistics.imports)
    return out.text()


def _add_speculation(out: Exposition, speculation: SpeculationStatistics) -> None:
    prefix = "vllm:spec_decode_num"
    out.counter(f"{prefix}_drafts", "proposals verified", speculation.num_drafts)
    out.counter(f"{prefix}_draft_tokens", "drafted tokens", speculation.num_draft_tokens)
    out.counter(f"{prefix}_accepted_tokens", "of these, accepted", speculation.num_accepted_tokens)
    out.counters(
        f"{prefix}_accepted_tokens_per_pos",
        "accepted tokens by their place in the proposal",
        ("position",),
        {str(i): float(n) for i, n in enumerate(speculation.accepted_by_position)},
    )
    out.counter(
        "baton_spec_decode_emitted_tokens",
        "tokens that decodes with drafts gave: accepted ones and the target's own",
        speculation.num_emitted_tokens,
    )
    out.counters(
        "baton_spec_decode_lengths",
        "decodes by how many drafted tokens they verified",
        ("k",),
        {str(k): float(n) for k, n in enumerate(speculation.lengths) if k},
    )
    out.counters(
        "baton_spec_decode_reasons",
        "decodes by why they had drafts, or none",
        ("reason",),
        {reason.value: float(n) for reason, n in speculation.reasons.items()},
    )
    out.counter("baton_spec_decode_invalid", "proposals ignored", speculation.num_invalid)
    out.counter("baton_spec_decode_proposal_seconds", "time to propose", speculation.proposal_s)
    out.gauge(
        "baton_spec_decode_acceptance",
        "estimated acceptance of a drafted token, 0 to 1",
        speculation.acceptance,
    )


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
