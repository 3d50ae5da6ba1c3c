"""The gateway's numbers: vLLM's names where the meaning is the same, `baton_` for the rest.

Whoever serves ``/metrics`` calls `exposition`, on the admin port and on the public HTTP port alike.
"""

from common.errors import Unavailable
from common.metrics import Exposition
from gateway.gateway import Gateway, GatewayStatistics
from gateway.local_prefill import Reason
from gateway.request_meter import RequestMeter

_REFUSALS = ("tenant_full", "full", "deadline")


def exposition(gateway: Gateway) -> str:
    try:
        model_name = gateway.parser.facts().name
    except Unavailable:  # no worker has said yet what it serves
        model_name = ""
    out = Exposition(model_name, "gateway")
    statistics, meter = gateway.statistics(), gateway.pipeline.meter
    _add_requests(out, statistics, meter)
    _add_times(out, meter)
    _add_queues(out, statistics, meter)
    _add_attempts(out, statistics)
    _add_workers(out, statistics)
    return out.text()


def _add_requests(out: Exposition, statistics: GatewayStatistics, meter: RequestMeter) -> None:
    waiting = min(statistics.num_waiting, statistics.num_running)
    running = statistics.num_running - waiting
    out.gauge("vllm:num_requests_running", "requests that a worker has", running)
    out.gauge("vllm:num_requests_waiting", "requests that wait for a worker", waiting)
    out.counter("vllm:prompt_tokens", "prompt tokens of answers begun", meter.num_prompt_tokens)
    out.counter("vllm:prompt_tokens_cached", "of them, found cached", meter.num_cached_tokens)
    out.counter("vllm:generation_tokens", "output tokens", meter.num_output_tokens)
    out.counters(
        "vllm:request_success", "choices by how they ended", ("finished_reason",), meter.ended
    )
    out.histogram("vllm:request_prompt_tokens", "prompt tokens a request", meter.prompt_tokens)
    out.histogram("vllm:request_generation_tokens", "output tokens a request", meter.output_tokens)
    out.histogram(
        "vllm:request_max_num_generation_tokens", "output tokens a choice", meter.output_tokens
    )
    out.histogram("vllm:request_params_max_tokens", "max_tokens asked for", meter.max_tokens)
    out.counter(
        "baton_recomputed_tokens", "tokens computed again after a loss", meter.num_recomputed_tokens
    )


def _add_times(out: Exposition, meter: RequestMeter) -> None:
    ttft, e2e = "vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"
    out.histogram(ttft, "from arrival to the first token", meter.time_to_first_token)
    out.histogram("vllm:inter_token_latency_seconds", "between two tokens", meter.inter_token)
    out.histogram(
        "vllm:request_time_per_output_token_seconds",
        "mean of a request, without its first token",
        meter.time_per_output_token,
    )
    out.histogram(e2e, "from arrival to the end", meter.e2e)
    out.histogram("vllm:request_queue_time_seconds", "waiting, in all queues", meter.queue)
    out.histogram("vllm:request_prefill_time_seconds", "computing the prompt", meter.prefill)
    out.histogram("vllm:request_decode_time_seconds", "giving tokens", meter.decode)
    out.histogram(
        "vllm:request_inference_time_seconds", "prefill, transfer and decode", meter.inference
    )
    out.histogram(
        "baton_request_transfer_seconds", "from claim to settle, by request", meter.transfer
    )


def _add_queues(out: Exposition, statistics: GatewayStatistics, meter: RequestMeter) -> None:
    pool = ("pool",)
    out.gauges(
        "baton_queue_requests",
        "prefill: requests that no worker has; decode: those asking for a promise of room",
        pool,
        {"prefill": statistics.num_waiting, "decode": statistics.num_waiting_for_room},
    )
    out.gauges(
        "baton_queue_tokens",
        "prompt tokens of requests that no worker has",
        pool,
        {"prefill": statistics.num_waiting_tokens},
    )
    out.histograms(
        "baton_queue_wait_seconds",
        "time that a request waited for a pool",
        pool,
        {"prefill": meter.prefill_wait, "decode": meter.decode_wait},
    )
    refusals = statistics.admission_refusals
    out.counters(
        "baton_admission_refusals",
        "requests refused before anything was spent on them",
        ("reason",),
        {reason: refusals.get(reason, 0) for reason in _REFUSALS},
    )
    out.counters(
        "baton_prefill_decisions",
        "where prompts were computed, and why there",
        ("where", "reason"),
        {
            ("decode" if reason.is_local else "prefill", reason.value): (
                statistics.prefill_decisions.get(reason.value, 0)
            )
            for reason in Reason
        },
    )


def _add_attempts(out: Exposition, statistics: GatewayStatistics) -> None:
    counters = statistics.counters
    out.counters(
        "baton_requests_ended",
        "choices by outcome",
        ("outcome",),
        {
            "completed": counters.completed,
            "failed": counters.failed,
            "cancelled": counters.cancelled,
        },
    )
    out.counter("baton_attempts", "tries to have a request run", counters.attempts)
    out.counters(
        "baton_attempts_lost",
        "tries that gave no answer",
        ("reason",),
        {"worker_lost": counters.worker_lost, "kv_lost": counters.kv_lost},
    )
    out.counter("baton_poison_requests", "given up after two dead owners", counters.poison)
    out.counter("baton_jobs_published", "prefill jobs", counters.jobs_published)
    out.gauge("baton_jobs_unaccepted", "published, not yet owned", statistics.num_unaccepted_jobs)
    out.counter("baton_fenced", "messages of an attempt that is over", counters.fenced)
    out.counter("baton_duplicate_tokens", "tokens that came twice", counters.duplicates)


def _add_workers(out: Exposition, statistics: GatewayStatistics) -> None:
    out.gauges(
        "baton_workers",
        "workers by role that are ready, or refused as not compatible",
        ("worker_role", "state"),
        {
            ("prefill", "ready"): statistics.num_prefill_workers,
            ("decode", "ready"): statistics.num_decode_workers,
            ("any", "refused"): statistics.num_refused_workers,
        },
    )
    out.gauge("baton_decode_links", "streams to decode workers", statistics.num_decode_links)
    index = statistics.prefix_index
    out.gauge("baton_prefix_index_keys", "cached blocks known of all workers", index.num_keys)
    out.gauge("baton_prefix_index_bytes", "memory of the prefix index", index.num_bytes)
    out.counter("baton_prefix_index_gaps", "times it was out of step", index.num_gaps)
