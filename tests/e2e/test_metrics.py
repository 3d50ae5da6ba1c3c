"""What every process exports after a known load, and again when nothing is going on."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
import pytest_asyncio
from support.answers import Answer, answer_of
from support.cluster import Cluster, Process, baton_up
from support.engines import prompt_of
from support.scrape import Scrape, scrape, total

from common.client import BatonClient, Sampling
from common.errors import BatonError
from engine.oracle import oracle_layout

BLOCK = 16
NUM_REQUESTS, PROMPT, OUTPUT = 6, 80, 12
# All but the last token of a prompt that is sent again is found cached.
HIT = PROMPT - 1
BLOCK_BYTES = oracle_layout(BLOCK).block_bytes
# Nothing is computed on a decode worker but output.
FLAGS = ("--num-blocks", "256", "--local-prefill", "never", "--step-delay-ms", "5")


@dataclass
class Load:
    """What was sent, and what every process exported after it."""

    answers: Sequence[Answer]
    before: dict[str, Scrape]
    during: dict[str, Scrape]
    after: dict[str, Scrape]


async def _scrapes(processes: Sequence[Process]) -> dict[str, Scrape]:
    """By role; there is one process of each."""
    found = [await asyncio.to_thread(scrape, process.admin) for process in processes]
    return {process.role: one for process, one in zip(processes, found, strict=True)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with baton_up(tmp_path_factory.mktemp("metrics"), flags=FLAGS) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def load(cluster: Cluster) -> Load:
    """Six requests at once, then the first prompt again, then one that its client leaves."""
    sampling = Sampling(max_tokens=OUTPUT, temperature=0.0, seed=0)
    before = await _scrapes(cluster.processes)
    async with BatonClient(cluster.grpc) as client:
        first = [
            asyncio.ensure_future(answer_of(client, prompt_of(i, PROMPT), sampling))
            for i in range(NUM_REQUESTS)
        ]
        answers = [await answer for answer in first]
        answers.append(await answer_of(client, prompt_of(0, PROMPT), sampling))
        leaving = client.generate(prompt_of(50, PROMPT), Sampling(max_tokens=2000, seed=0))
        await anext(aiter(leaving))
        during = await _scrapes(cluster.processes)
        await leaving.aclose()
        with pytest.raises(BatonError):
            await answer_of(client, [], sampling)
    await cluster.until_clean()
    return Load(answers, before, during, await _scrapes(cluster.processes))


NUM_ANSWERS = NUM_REQUESTS + 1


async def test_requests_and_tokens(load: Load) -> None:
    found = load.after["gateway"]
    assert found("vllm:request_success_total", finished_reason="length") == NUM_ANSWERS
    assert found("vllm:request_success_total", finished_reason="abort") == 1
    assert found("vllm:request_success_total", finished_reason="error") == 0
    assert found("vllm:prompt_tokens_total") == (NUM_ANSWERS + 1) * PROMPT
    assert found("vllm:prompt_tokens_cached_total") == HIT
    given = found("vllm:generation_tokens_total")
    assert given > NUM_ANSWERS * OUTPUT  # and what the one who left was given
    assert all(answer.complete.usage.output_tokens == OUTPUT for answer in load.answers)
    for name, each in {
        "vllm:request_prompt_tokens": PROMPT,
        "vllm:request_generation_tokens": OUTPUT,
        "vllm:request_max_num_generation_tokens": OUTPUT,
        "vllm:request_params_max_tokens": OUTPUT,
    }.items():
        assert found(f"{name}_count") == NUM_ANSWERS
        assert found(f"{name}_sum") == NUM_ANSWERS * each
    assert {labels["model_name"] for labels, _ in found.samples["vllm:prompt_tokens_total"]} == {
        "oracle"
    }


async def test_times_are_those_that_the_clients_were_told(load: Load) -> None:
    found = load.after["gateway"]
    phases = [answer.complete.phases_ms for answer in load.answers]
    told = {
        "vllm:e2e_request_latency_seconds": [phase.total for phase in phases],
        "vllm:request_prefill_time_seconds": [phase.prefill for phase in phases],
        "vllm:request_decode_time_seconds": [phase.decode for phase in phases],
        "vllm:request_queue_time_seconds": [
            phase.queue + phase.prefill_queue + phase.decode_queue for phase in phases
        ],
        "vllm:request_inference_time_seconds": [
            phase.prefill + phase.transfer + phase.decode for phase in phases
        ],
        "baton_request_transfer_seconds": [phase.transfer for phase in phases],
    }
    for name, milliseconds in told.items():
        assert found(f"{name}_count") == NUM_ANSWERS, name
        assert found(f"{name}_sum") == pytest.approx(sum(milliseconds) / 1000), name
        assert found(f"{name}_bucket", le="+Inf") == NUM_ANSWERS, name
    # The one who left had a first token, too.
    assert found("vllm:time_to_first_token_seconds_count") == NUM_ANSWERS + 1
    first_s = sum(phase.time_to_first_token for phase in phases) / 1000
    assert found("vllm:time_to_first_token_seconds_sum") > first_s
    given = found("vllm:generation_tokens_total")
    assert found("vllm:inter_token_latency_seconds_count") == given - (NUM_ANSWERS + 1)
    assert found("vllm:request_time_per_output_token_seconds_count") == NUM_ANSWERS
    for pool in ("prefill", "decode"):
        assert found("baton_queue_wait_seconds_count", pool=pool) == NUM_ANSWERS


async def test_the_engines(load: Load) -> None:
    prefill, decode = load.after["prefill"], load.after["decode"]
    num_computed = (NUM_REQUESTS + 1) * PROMPT + (PROMPT - HIT)
    assert prefill("baton_tokens_computed_total", phase="prefill") == num_computed
    assert prefill("baton_tokens_computed_total", phase="decode") == 0
    assert prefill("baton_tokens_sampled_total") == NUM_ANSWERS + 1
    assert prefill("vllm:prefix_cache_queries_total") == (NUM_ANSWERS + 1) * PROMPT
    assert prefill("vllm:prefix_cache_hits_total") == HIT
    assert prefill("vllm:iteration_tokens_total_sum") == num_computed
    assert decode("baton_tokens_computed_total", phase="prefill") == 0
    num_decoded = decode("baton_tokens_computed_total", phase="decode")
    assert num_decoded == decode("vllm:iteration_tokens_total_sum")
    assert num_decoded >= NUM_ANSWERS * (OUTPUT - 1)
    for worker in (prefill, decode):
        num_steps = worker("baton_step_seconds_count")
        assert num_steps == worker("vllm:iteration_tokens_total_count") > 0
        assert worker("baton_step_sequences_count") == num_steps
        assert worker("baton_step_seconds_sum") > 0
        assert worker("vllm:num_preemptions_total") == 0
        assert worker("vllm:cache_config_info", block_size="16", num_gpu_blocks="256") == 1
        assert worker("baton_worker_ready") == 1


async def test_bytes(load: Load) -> None:
    """The oracle has no weights: its steps compute nothing and move KV alone."""
    prefill, decode = load.after["prefill"], load.after["decode"]
    num_blocks = (NUM_REQUESTS + 1) * PROMPT // BLOCK  # the repeated prompt is there already
    assert decode("baton_transfer_blocks_total", transport="shm") == num_blocks
    assert decode("baton_transfer_bytes_total", transport="shm") == num_blocks * BLOCK_BYTES
    assert prefill("baton_transfer_sent_bytes_total", transport="shm") == num_blocks * BLOCK_BYTES
    assert decode("baton_transfer_seconds_total", transport="shm") > 0
    assert decode("baton_transfers_total") == NUM_ANSWERS + 1
    per_token = BLOCK_BYTES // BLOCK
    # A new prompt: read as a whole, written as a whole. The repeated one: its last token written.
    moved = (NUM_REQUESTS + 1) * 2 * PROMPT + (PROMPT + 1)
    assert prefill("baton_memory_bytes_total", phase="prefill") == moved * per_token
    assert prefill("baton_flops_total", phase="prefill") == 0
    assert decode("baton_memory_bytes_total", phase="decode") > 0


async def test_leases_and_promises(load: Load) -> None:
    prefill, decode, gateway = (load.after[r] for r in ("prefill", "decode", "gateway"))
    assert prefill("baton_leases_offered_total") == NUM_ANSWERS + 1
    ended = prefill("baton_leases_ended_total", outcome="settled")
    # A hand-off of which everything is there already is released, not settled.
    assert ended == NUM_ANSWERS
    assert prefill("baton_leases_ended_total", outcome="released") == 1
    assert prefill("baton_leases_ended_total", outcome="expired") == 0
    assert prefill("baton_jobs_ended_total", outcome="succeeded") == NUM_ANSWERS + 1
    assert decode("baton_promises_asked_total", outcome="granted") == NUM_ANSWERS + 1
    assert decode("baton_sequences_ended_total", outcome="finished") == NUM_ANSWERS
    assert decode("baton_sequences_ended_total", outcome="aborted") == 1
    assert gateway("baton_jobs_published_total") == NUM_ANSWERS + 1
    assert gateway("baton_attempts_total") == NUM_ANSWERS + 1
    assert gateway("baton_prefill_decisions_total", reason="never") == NUM_ANSWERS + 1
    assert gateway("baton_workers", worker_role="prefill", state="ready") == 1
    assert gateway("baton_workers", worker_role="decode", state="ready") == 1


async def test_while_a_request_runs_and_when_idle(load: Load) -> None:
    assert load.during["gateway"]("vllm:num_requests_running") == 1
    assert load.during["decode"]("baton_kv_blocks", state="in_use") > 0
    assert load.during["decode"]("vllm:kv_cache_usage_perc") > 0
    for role, found in load.after.items():
        assert found("vllm:num_requests_running") == found("vllm:num_requests_waiting") == 0, role
        if role == "gateway":
            continue
        assert found("vllm:kv_cache_usage_perc") == 0
        assert found("baton_kv_blocks") == 256
        for state in ("in_use", "leased", "importing"):
            assert found("baton_kv_blocks", state=state) == 0, (role, state)
    gateway = load.after["gateway"]
    assert gateway("baton_queue_tokens", pool="prefill") == 0
    assert gateway("baton_queue_requests", pool="prefill") == 0
    assert gateway("baton_queue_requests", pool="decode") == 0
    assert total([load.after["prefill"]], "baton_leases") == 0
    assert load.after["decode"]("baton_promised_blocks") == 0
    assert load.after["decode"]("baton_streams") == 1


# What vLLM's own Grafana dashboard and the Gateway API's inference extension ask for.
VLLM = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count", "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_bucket",
)  # fmt: skip


async def test_vllms_dashboard_finds_its_series(load: Load) -> None:
    for name in VLLM:
        series = [found.samples.get(name, []) for found in load.after.values()]
        assert any(labels["model_name"] == "oracle" for one in series for labels, _ in one), name


@pytest.mark.fault("V22")
async def test_series_are_bounded(load: Load, cluster: Cluster) -> None:
    """Whatever clients send, there are the same series; only transports appear as they are used,
    and refusals as they happen."""
    async with BatonClient(cluster.grpc) as client:
        for i in range(5):
            sampling = Sampling(max_tokens=1 + i, temperature=0.1 * i, seed=i)
            await answer_of(client, prompt_of(90 + i, 17 + i), sampling, cache_salt=f"salt-{i}")
    await cluster.until_clean()
    after = await _scrapes(cluster.processes)
    for role, found in after.items():
        assert found.series == load.after[role].series, role
        assert len(found.text) < 64 << 10
        new = {name for name, _ in found.series} - {n for n, _ in load.before[role].series}
        assert all(name.startswith("baton_transfer") for name in new), (role, new)
