"""Clients that leave, in every phase of a request: both pools get their blocks back.

Every step of the protocol takes a while here, so that a cancel at a random moment meets each of
them: queued, reserving, published, being accepted, computing, offering, between ticket and Start,
claiming, copying, settling, decoding.
"""

import asyncio
import random
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from support.cluster import Cluster, baton_up
from support.oracle_requests import Case, ask, ask_all, make_cases

from common import rpc
from common.client import BatonClient, make_request
from common.failpoints import FAILPOINTS
from common.wire import inference_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_CANCELS = 300
AT_ONCE = 12
STEP_S = 0.01
# One that is called for each block or step takes its time each time.
BRIEF = {
    "decode.copy_block", "prefill.chunk", "decode.before_send", "decode.after_send",
    "engine.step", "engine.row",
}  # fmt: skip
# Of no request, or made to be obeyed.
OTHERS = {
    "worker.report", "gateway.before_heartbeat", "decode.before_heartbeat",
    "transfer.corrupt_block", "transfer.corrupt_checksum",
}  # fmt: skip
SLOW_STEPS = sorted(FAILPOINTS.keys() - BRIEF - OTHERS)
FLAGS = [
    *("--num-blocks", "64", "--step-delay-ms", "1", "--lease-s", "3"),
    *("--max-num-batched-tokens", "64", "--allow-failpoints", "--failpoints"),
    ";".join([*(f"{name}=sleep:{STEP_S}" for name in SLOW_STEPS), "decode.copy_block=sleep:0.005"]),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with baton_up(tmp_path_factory.mktemp("cancel"), flags=FLAGS) as cluster:
        yield cluster


@pytest.mark.fault("F15", "V17")
async def test_cancels_in_all_phases(cluster: Cluster) -> None:
    await _cancel_many(cluster, seed=1, num_cancels=NUM_CANCELS)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2, 7))
@pytest.mark.fault("F15", "V17")
async def test_more_cancels(cluster: Cluster, seed: int) -> None:
    await _cancel_many(cluster, seed, num_cancels=1000)


async def _cancel_many(cluster: Cluster, seed: int, num_cancels: int) -> None:
    rng = random.Random(seed)
    cases = make_cases(seed, num_cancels + AT_ONCE, prompt_tokens=(1, 300), max_tokens=(20, 80))
    gate = asyncio.Semaphore(AT_ONCE)
    async with BatonClient(cluster.grpc) as client:
        # How long a request takes among others decides how late the latest cancel comes.
        answers = await ask_all(client, cases[-AT_ONCE:])
        whole_s = max(answer.arrivals_s[-1] - answer.started_s for answer in answers)
        print(f"a request takes up to {whole_s:.2f} s")

        async def cancelled(case: Case, after_s: float) -> int:
            async with gate:
                return await _cancel(cluster.grpc, case, after_s)

        seen = await asyncio.gather(
            *(cancelled(case, rng.uniform(0, whole_s)) for case in cases[:num_cancels])
        )
        await cluster.until_clean()
        num_late = sum(num > 1 for num in seen)
        print(f"{seen.count(0)} left before the first token, {num_late} while decoding")
        assert min(seen.count(0), num_late) > num_cancels / 10
        (await ask(client, cases[-1])).assert_right()
    await cluster.until_clean()
    await _assert_met_both_workers(cluster)


async def _cancel(target: str, case: Case, after_s: float) -> int:
    """Runs a request for so long, then cancels it, twice; or closes its connection, every fourth
    time. Returns how many tokens had come."""
    async with rpc.make_public_channel(target) as channel:
        stub = inference_grpc.InferenceServiceStub(channel)
        call = stub.Generate(make_request(case.prompt_ids, case.sampling))
        num_tokens = 0
        try:
            async with asyncio.timeout(after_s):
                async for response in call:
                    num_tokens += len(response.chunk.token_ids)
        except (TimeoutError, grpc.RpcError, asyncio.CancelledError):
            pass
        if len(case.prompt_ids) % 4:
            call.cancel()
            call.cancel()
    return num_tokens


async def _assert_met_both_workers(cluster: Cluster) -> None:
    """Cancels hit work on either side, and nobody held a late word against anyone."""
    (gateway,) = cluster.of_role("gateway")
    (prefill,) = cluster.of_role("prefill")
    (decode,) = cluster.of_role("decode")
    counters = (await cluster.debug(gateway, "gateway"))["counters"]
    print(f"gateway: {counters}")
    assert counters["cancelled"] > NUM_CANCELS / 2
    assert counters["worker_lost"] == counters["kv_lost"] == 0
    statistics = await cluster.debug(prefill, "statistics")
    assert statistics["cancelled"] + statistics["dropped"] + statistics["refused"] > 0
    assert (await cluster.debug(decode, "statistics"))["aborted"] > 0
