"""What tracing costs at full sampling: CPU seconds a token, with and without it. JSON.

``python -m bench.tracing [--pairs 20] [--model null]``

Two deployments of `baton up` run side by side, one of them with ``OTEL_SDK_DISABLED=true``. They
take turns with the same load, and who goes first alternates, so both see the same machine. A pair
is the CPU time of the gateway and the workers for one load on each; the figure is the median of the
pairs' differences, as a share of the untraced time, with its 95 % interval.

The engine's thread, the busiest of a worker with a model, does nothing for a trace but computes all
tokens; its seconds differ by 10 % between two deployments that are alike, by where their weights
happen to lie. So the difference is that of all other threads; the share is of all. ``--model null``
computes nothing: there all threads count, and tracing stands beside the bare token path, which is
the worst case.

What `baton up` spends to receive and keep the spans is a collector's work, and stands apart.
"""

import argparse
import asyncio
import json
from collections import Counter
from typing import Any

import uvloop

from bench.bounds import at_most, pair_interval
from bench.deployment import Deployment, deployment
from bench.plumbing import generate
from common import rpc
from common.wire import inference_grpc

MAX_SHARE = 0.03
PROMPT_TOKENS = 64
# Steps of the null model; a real one takes as long as it takes.
STEPS_PER_S = 100
NUM_BLOCKS = 512
WORKERS = ("prefill", "decode")
SERVING = ("gateway", *WORKERS)
ENGINE = ".engine"
# Spans leave in batches: the last are sent by then.
_SETTLE_S = 0.5


async def cpu_s_per_token(
    up: Deployment, num_streams: int, num_tokens: int, first_prompt: int
) -> Counter[str]:
    """Of one load, by process; under ``WORKER + ENGINE`` that of a worker's engine alone."""
    before = spent_s(up)
    async with rpc.make_public_channel(up.target) as channel:
        stub = inference_grpc.InferenceServiceStub(channel)
        prompts = [_prompt_of(first_prompt + i) for i in range(num_streams)]
        await asyncio.gather(*(generate(stub, prompt, num_tokens) for prompt in prompts))
        await asyncio.sleep(_SETTLE_S)
    spent = spent_s(up)
    spent.subtract(before)
    total = num_streams * num_tokens
    return Counter({name: seconds / total for name, seconds in spent.items()})


def spent_s(up: Deployment) -> Counter[str]:
    busiest = up.busiest_thread_s()
    engines = {f"{name}{ENGINE}": busiest[name] for name in WORKERS}
    return up.cpu_s() + Counter(engines)


def _prompt_of(number: int) -> list[int]:
    """No two begin alike, so that nothing is cached."""
    return [1 + (number + i * i) % 1000 for i in range(PROMPT_TOKENS)]


async def measure(num_pairs: int, model: str, num_streams: int, num_tokens: int) -> dict[str, Any]:
    flags = ("--model", model, "--num-blocks", str(NUM_BLOCKS))
    async with (
        deployment(STEPS_PER_S, *flags, environment={"OTEL_SDK_DISABLED": "false"}) as traced,
        deployment(STEPS_PER_S, *flags, environment={"OTEL_SDK_DISABLED": "true"}) as plain,
    ):
        shares: list[float] = []
        spent: list[tuple[Counter[str], Counter[str]]] = []
        for number in range(-1, num_pairs):  # the first warms up
            of: dict[Deployment, Counter[str]] = {}
            for up in (traced, plain) if number % 2 else (plain, traced):
                first_prompt = (number + 1) * num_streams
                of[up] = await cpu_s_per_token(up, num_streams, num_tokens, first_prompt)
            if number >= 0:
                spent.append((of[traced], of[plain]))
                more_s = _beside_engines_s(of[traced], model) - _beside_engines_s(of[plain], model)
                shares.append(more_s / _serving_s(of[plain]))
    interval = pair_interval(shares)
    return {
        "model": model,
        "num_pairs": num_pairs,
        "cost": {**at_most(interval["median"], MAX_SHARE, "of CPU s a token"), **interval},
        "traced_cpu_s_per_1000_tokens": _mean_per_1000([one for one, _ in spent]),
        "plain_cpu_s_per_1000_tokens": _mean_per_1000([one for _, one in spent]),
    }


def _serving_s(cpu_s: Counter[str]) -> float:
    return sum(cpu_s[name] for name in SERVING)


def _beside_engines_s(cpu_s: Counter[str], model: str) -> float:
    """What tracing can change."""
    if model == "null":
        return _serving_s(cpu_s)
    return _serving_s(cpu_s) - sum(cpu_s[f"{name}{ENGINE}"] for name in WORKERS)


def _mean_per_1000(loads: list[Counter[str]]) -> dict[str, float]:
    return {name: 1000 * sum(load[name] for load in loads) / len(loads) for name in loads[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--model", default="default", help="as `baton up` takes it")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    result = uvloop.run(measure(given.pairs, given.model, given.streams, given.tokens))
    rounded = json.loads(json.dumps(result), parse_float=lambda text: round(float(text), 5))
    print(json.dumps(rounded, indent=2))


if __name__ == "__main__":
    main()
