"""The token path without a model: how much it carries, how late tokens are, what it costs. JSON.

``python -m bench.plumbing [--rounds 3]``

Two deployments of `baton up --model null` (1 prefill worker, 1 decode worker, a gateway and
nats-server, each a process) run side by side, one with steps of 1/170 s and one of 1/40 s; this
process is their gRPC client. What is measured takes turns, so that all of it sees the same machine:

- *throughput*: 64 streams at 170 steps/s, counted while all 64 run.
- *age of a token*: from the end of the engine step that made it until this process has the message
  with it. Both ends are read off CLOCK_MONOTONIC, which the machine's processes share: the decode
  worker's debug page lists when each of its latest steps ended, and a request's trace says when the
  last step that served it ended. A sequence has one token in each step up to that one.
- *added time to the first token*: one request at a time through everything, against the same
  prompt given to an engine of the same pace in this process.
- *idle*: CPU of everything that one `baton up` runs, with nothing to do.

``other_cores`` says how many cores other programs kept busy meanwhile; CPU seconds depend on that
much less than times do.
"""

import argparse
import asyncio
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import psutil
import uvloop

from bench.deployment import BLOCK_SIZE, NUM_BLOCKS, Deployment, deployment, process_cpu_s
from common import rpc
from common.types import EngineEvent, SamplingParams, SequenceId, SequenceSpec, StepRecord
from common.wire import inference, inference_grpc
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.null_runner import VOCAB_SIZE, NullRunner
from engine.pace import Pace
from engine.scheduler import SchedulerConfig

NUM_STREAMS = 64
BATCH_STEPS_PER_S, SINGLE_STEPS_PER_S = 170, 40
PROMPT_TOKENS = 64
STREAM_TOKENS = 850
SINGLE_TOKENS, NUM_SINGLES = 6, 24
IDLE_S = 10.0
# Spans are sent in batches.
SETTLE_S = 1.0

# name: (unit, least, most)
BOUNDS: dict[str, tuple[str, float | None, float | None]] = {
    "tokens_per_s": ("1/s", 10_000, None),
    "tokens_a_message_max": ("", None, 8),
    "age_p50": ("ms", None, 40),
    "age_p99": ("ms", None, 80),
    "single_tokens_a_message_max": ("", None, 1),
    "added_first_token_p50": ("ms", None, 10),
    "gateway_resident": ("MB", None, 200),
    "idle_cpu": ("% of a core", None, 3),
}


# ---------------------------------------------------------------- what is measured


@dataclass(slots=True)
class Stream:
    """What one request's messages were: (when, output index of the first token, tokens)."""

    start_s: float
    messages: list[tuple[float, int, int]] = field(default_factory=list)
    trace_id: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(count for _, _, count in self.messages)

    def ages(self, step_ends: Sequence[float], last_end_s: float) -> list[float]:
        """Seconds, of every token but the first, which prefill made. ``last_end_s`` names the
        step of the last token; no two steps are as near to each other as its error."""
        last = min(range(len(step_ends)), key=lambda i: abs(step_ends[i] - last_end_s))
        first_step = last - self.num_tokens + 1
        return [
            arrived_s - step_ends[first_step + i]
            for arrived_s, index, count in self.messages
            for i in range(max(index, 1), index + count)
        ]


async def generate(
    stub: inference_grpc.InferenceServiceStub, prompt: Iterable[int], max_tokens: int
) -> Stream:
    request = inference.GenerateRequest(
        token_ids=inference.TokenIds(ids=prompt),
        sampling=inference.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
    )
    stream = Stream(time.monotonic())
    async for response in stub.Generate(request):
        if response.HasField("complete"):
            stream.trace_id = response.complete.trace_id
        else:
            chunk = response.chunk
            stream.messages.append((time.monotonic(), chunk.index, len(chunk.token_ids)))
    assert stream.num_tokens == max_tokens
    return stream


def prompt_of(number: int) -> list[int]:
    """No two share a block."""
    return [
        (number * 7 + i * (1 + number // VOCAB_SIZE)) % VOCAB_SIZE for i in range(PROMPT_TOKENS)
    ]


@dataclass(slots=True)
class Batch:
    """One round of 64 streams."""

    tokens_per_s: float
    message_sizes: list[int]
    ages: list[float]
    cpu_s: Counter[str]
    num_tokens: int


async def run_batch(up: Deployment, first_prompt: int) -> Batch:
    async with rpc.make_public_channel(up.target) as channel:
        stub = inference_grpc.InferenceServiceStub(channel)
        before, client_before = up.cpu_s(), process_cpu_s(psutil.Process())
        streams = await asyncio.gather(
            *(
                generate(stub, prompt_of(first_prompt + i), STREAM_TOKENS)
                for i in range(NUM_STREAMS)
            )
        )
        cpu_s = up.cpu_s()
        cpu_s.subtract(before)
        cpu_s["client"] = process_cpu_s(psutil.Process()) - client_before
    step_ends = up.step_ends()
    await asyncio.sleep(SETTLE_S)
    ages = []
    async with up.supervisor_channel() as channel:
        for stream in streams:
            ages += stream.ages(step_ends, await up.last_step_end(channel, stream.trace_id))
    begin = max(stream.messages[0][0] for stream in streams)
    end = min(stream.messages[-1][0] for stream in streams)
    messages = [message for stream in streams for message in stream.messages]
    num_in_window = sum(count for arrived_s, _, count in messages if begin < arrived_s <= end)
    return Batch(
        num_in_window / (end - begin),
        [count for _, _, count in messages],
        ages,
        cpu_s,
        NUM_STREAMS * STREAM_TOKENS,
    )


async def run_singles(up: Deployment, first_prompt: int) -> list[Stream]:
    async with rpc.make_public_channel(up.target) as channel:
        stub = inference_grpc.InferenceServiceStub(channel)
        return [
            await generate(stub, prompt_of(first_prompt + i), SINGLE_TOKENS)
            for i in range(NUM_SINGLES)
        ]


async def run_direct(first_prompt: int) -> list[float]:
    """Seconds to the first token of an engine called directly."""
    first_token = asyncio.Event()

    def on_events(events: Sequence[EngineEvent], record: StepRecord | None) -> None:
        if events:
            first_token.set()

    config = SchedulerConfig(async_depth=1)
    pool = BlockPool(NUM_BLOCKS + 1, BLOCK_SIZE)
    loop = EngineLoop(Engine(NullRunner(Pace(1 / SINGLE_STEPS_PER_S)), pool, config), on_events)
    params = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    times = []
    await loop.start()
    for i in range(NUM_SINGLES):
        prompt = tuple(prompt_of(first_prompt + i))
        spec = SequenceSpec(SequenceId(i), str(i), 1, prompt, (), params)
        first_token.clear()
        start_s = time.monotonic()
        loop.post(lambda engine, spec=spec: engine.add(spec))
        await first_token.wait()
        times.append(time.monotonic() - start_s)
    await loop.stop()
    return times


async def idle_share(up: Deployment) -> Counter[str]:
    """Of one core, by process."""
    before = up.cpu_s()
    await asyncio.sleep(IDLE_S)
    after = up.cpu_s()
    return Counter({name: (after[name] - before[name]) / IDLE_S for name in after})


# ---------------------------------------------------------------- all of it


@dataclass(slots=True)
class Measured:
    batches: list[Batch] = field(default_factory=list)
    singles: list[Stream] = field(default_factory=list)
    direct_s: list[float] = field(default_factory=list)
    idle: Counter[str] = field(default_factory=Counter)


async def measure(num_rounds: int) -> dict[str, object]:
    measured = Measured()
    num_prompts = 0
    async with deployment(BATCH_STEPS_PER_S) as batch_up, deployment(SINGLE_STEPS_PER_S) as one_up:
        await run_batch(batch_up, num_prompts)  # warm-up
        others = OtherPrograms((batch_up, one_up))
        for _ in range(num_rounds):
            num_prompts += NUM_STREAMS
            measured.batches.append(await run_batch(batch_up, num_prompts))
            measured.singles += await run_singles(one_up, num_prompts)
            measured.direct_s += await run_direct(num_prompts)
        measured.idle = await idle_share(one_up)
        resident = batch_up.processes["gateway"].memory_info().rss / 1e6
        other_cores = others.num_cores()
    return {
        "figures": _figures(measured, resident),
        "cpu_s_per_1000_tokens": _cpu_per_1000(measured.batches),
        "idle_share": measured.idle,
        "other_cores": other_cores,
    }


class OtherPrograms:
    """How many cores were busy with neither us nor the deployments, since it was made."""

    def __init__(self, ups: Sequence[Deployment]) -> None:
        self._ups = ups
        self._start = (time.monotonic(), *self._busy_s())

    def _busy_s(self) -> tuple[float, float]:
        machine = psutil.cpu_times()
        busy_s = sum(machine) - machine.idle - getattr(machine, "iowait", 0.0)
        own_s = sum(sum(up.cpu_s().values()) for up in self._ups) + process_cpu_s(psutil.Process())
        return busy_s, own_s

    def num_cores(self) -> float:
        start_s, busy_s, own_s = self._start
        busy_now_s, own_now_s = self._busy_s()
        return (busy_now_s - busy_s - (own_now_s - own_s)) / (time.monotonic() - start_s)


def _figures(measured: Measured, resident_mb: float) -> dict[str, dict[str, object]]:
    ages = sorted(age for batch in measured.batches for age in batch.ages)
    first_tokens = [stream.messages[0][0] - stream.start_s for stream in measured.singles]
    values = {
        "tokens_per_s": statistics.median(batch.tokens_per_s for batch in measured.batches),
        "tokens_a_message_max": max(max(batch.message_sizes) for batch in measured.batches),
        "age_p50": ages[len(ages) // 2] * 1000,
        "age_p99": ages[int(len(ages) * 0.99)] * 1000,
        "single_tokens_a_message_max": max(
            count for stream in measured.singles for _, _, count in stream.messages
        ),
        "added_first_token_p50": (
            statistics.median(first_tokens) - statistics.median(measured.direct_s)
        )
        * 1000,
        "gateway_resident": resident_mb,
        "idle_cpu": sum(measured.idle.values()) * 100,
    }
    return {name: _beside_bound(name, value) for name, value in values.items()}


def _beside_bound(name: str, value: float) -> dict[str, object]:
    unit, least, most = BOUNDS[name]
    bound = {"at_least": least} if least is not None else {"at_most": most}
    good = (least is None or value >= least) and (most is None or value <= most)
    return {"value": value, "unit": unit, **bound, "ok": good}


def _cpu_per_1000(batches: Sequence[Batch]) -> dict[str, float]:
    names = batches[0].cpu_s
    return {
        name: statistics.median(batch.cpu_s[name] / batch.num_tokens * 1000 for batch in batches)
        for name in names
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    # As the processes under test do (common/ready.py).
    gc.collect()
    gc.freeze()
    result = uvloop.run(measure(rounds))
    rounded = json.loads(json.dumps(result), parse_float=lambda text: round(float(text), 4))
    print(json.dumps(rounded, indent=2))


if __name__ == "__main__":
    main()
