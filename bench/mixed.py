"""Long prompts beside running streams: one process, with and without chunks, and two pools. JSON.

``python -m bench.mixed [--part stalls|goodput|throughput|all] [--plot PREFIX]``

All set-ups run SmolLM2 on the same cores: one engine with all of them, or two with half each.

- *stalls*: streams decode without end while long prompts arrive (open loop, Poisson, the same
  arrivals for all three); inter-token latency of the streams.
- *goodput*: the share of requests inside both targets over a sweep of rates, again open loop; the
  goodput of a set-up is the highest rate with at least 90 % inside.
- *throughput*: long and short prompts, as fast as they go, without chunked prefill and with budgets
  of 512, 2,048 and 8,192 tokens a step.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.bounds import at_most
from cli.bench.load import Outcome, run_closed, run_open
from cli.bench.plot import bars, lines, new_figure, save
from cli.bench.report import as_json, rounded
from cli.bench.setup import Setup, baton
from cli.bench.summary import Summary, Targets, spread, summarise
from cli.bench.target import Target
from cli.bench.workloads import Session, poisson, random_lengths, single
from cli.launch_plan import threads_per_engine

SEED = 17
ONE_PROCESS = ("--prefill", "0", "--decode", "0", "--colocated", "1")
SETUPS = {
    "one process, no chunks": (*ONE_PROCESS, "--no-enable-chunked-prefill"),
    "one process, chunks": ONE_PROCESS,
    "two pools": ("--prefill", "1", "--decode", "1"),
}
# A stream's length that no run reaches.
ENDLESS = 6000
SETTLE_S = 0.5
SHORT, LONG = (64, 32), (1024, 32)
TARGETS = Targets(ttft_s=3.0, tpot_s=0.06)
SHARE_INSIDE = 0.9


def _setup(arguments: argparse.Namespace, *flags: str) -> Any:
    return baton("--model", arguments.model, "--num-blocks", str(arguments.num_blocks), *flags)


def say(text: str) -> None:
    sys.stderr.write(f"{text} ...\n")


# ---------------------------------------------------------------- stalls


async def stalls(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, flags in SETUPS.items():
        say(f"stalls, {name}")
        async with _setup(arguments, *flags) as setup:
            found[name] = await _stalls_of(setup, arguments)
    base = found["one process, no chunks"]["itl_ms"]["p99"]
    ratios = {name: found[name]["itl_ms"]["p99"] / base for name in SETUPS}
    return {
        "load": {
            "streams": arguments.streams,
            "prompt_tokens": arguments.prompt,
            "prompts_per_s": arguments.rate,
            "duration_s": arguments.duration,
            "seed": SEED,
        },
        "setups": found,
        "p99_over_no_chunks": {
            "one process, chunks": at_most(ratios["one process, chunks"], 0.5, ""),
            "two pools": at_most(ratios["two pools"], 0.3, ""),
        },
    }


async def _stalls_of(setup: Setup, arguments: argparse.Namespace) -> dict[str, Any]:
    """The streams' gaps, from when all of them run until the last long prompt has come."""
    arrivals = poisson(arguments.duration, arguments.rate, SEED)
    prompts = single(len(arrivals), SEED, arguments.prompt, 1)
    streams = single(arguments.streams, SEED + 1, 32, ENDLESS)
    loop = asyncio.get_running_loop()
    async with setup.target() as target:
        watched = Streams(target)
        running = [asyncio.create_task(watched.run(session)) for session in streams]
        try:
            await watched.all_began(len(streams))
            begin_s = loop.time()
            outcomes = await run_open(target, prompts, arrivals)
            end_s = loop.time()
            # The last prompt's stall ends with it, or a step later.
            await asyncio.sleep(SETTLE_S)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    gaps = watched.gaps(begin_s, end_s)
    summary = summarise(outcomes, TARGETS)
    itl = spread(gaps)
    assert itl is not None and summary.ttft_ms is not None
    return {
        "itl_ms": asdict(itl),
        "itl_max_ms": 1000 * max(gaps),
        "num_gaps": len(gaps),
        "stream_tokens_per_s": watched.num_tokens(begin_s, end_s) / (end_s - begin_s),
        "prompts": summary.num_ok,
        "prompt_ttft_ms": asdict(summary.ttft_ms),
    }


class Streams:
    """Requests that run until they are cancelled, and when each of their messages came."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._began = asyncio.Semaphore(0)
        self._arrivals: list[list[tuple[float, int]]] = []

    async def run(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        arrivals: list[tuple[float, int]] = []
        self._arrivals.append(arrivals)
        (turn,) = session.turns
        async with aclosing(self._target.send(turn.new_ids, turn.max_tokens, False)) as pieces:
            async for piece in pieces:
                if not arrivals:
                    self._began.release()
                arrivals.append((loop.time(), piece.num_tokens))

    async def all_began(self, num_streams: int) -> None:
        for _ in range(num_streams):
            await self._began.acquire()

    def gaps(self, begin_s: float, end_s: float) -> list[float]:
        """Those that have a part in this time."""
        return [
            after - before
            for arrivals in self._arrivals
            for (before, _), (after, _) in pairwise(arrivals)
            if after > begin_s and before < end_s
        ]

    def num_tokens(self, begin_s: float, end_s: float) -> int:
        return sum(
            count
            for arrivals in self._arrivals
            for time_s, count in arrivals
            if begin_s < time_s <= end_s
        )


# ---------------------------------------------------------------- goodput


async def goodput(arguments: argparse.Namespace) -> dict[str, Any]:
    rates = [float(rate) for rate in arguments.rates.split(",")]
    found: dict[str, Any] = {}
    for name, flags in SETUPS.items():
        say(f"goodput, {name}")
        async with _setup(arguments, *flags) as setup, setup.target() as target:
            await run_closed(target, random_lengths(2, SEED, *_around(arguments), "warm-up"), 2)
            rows = {rate: await _at_rate(target, rate, arguments) for rate in rates}
        inside = {rate: row.num_good / row.num_requests for rate, row in rows.items()}
        found[name] = {
            "goodput": max((r for r in rates if inside[r] >= SHARE_INSIDE), default=0.0),
            "share_inside": {str(rate): share for rate, share in inside.items()},
            "good_per_s": {str(rate): row.goodput for rate, row in rows.items()},
            "rows": {str(rate): as_json(row) for rate, row in rows.items()},
        }
    return {
        "load": {
            "rates": rates,
            "seconds_each": arguments.seconds,
            "prompt_tokens_mean": arguments.goodput_prompt,
            "output_tokens_mean": arguments.goodput_output,
            "ttft_target_ms": TARGETS.ttft_s * 1000,
            "tpot_target_ms": TARGETS.tpot_s * 1000,
            "seed": SEED,
        },
        "setups": found,
    }


def _around(arguments: argparse.Namespace) -> tuple[int, int]:
    return arguments.goodput_prompt, arguments.goodput_output


async def _at_rate(target: Target, rate: float, arguments: argparse.Namespace) -> Summary:
    arrivals = poisson(arguments.seconds, rate, SEED)
    # The same lengths at every rate, other tokens: nothing is found in a cache.
    sessions = random_lengths(len(arrivals), SEED, *_around(arguments), f"{rate}")
    return summarise(await run_open(target, sessions, arrivals), TARGETS)


# ---------------------------------------------------------------- throughput


async def throughput(arguments: argparse.Namespace) -> dict[str, Any]:
    budgets: dict[str, tuple[str, ...]] = {"no chunks": ("--no-enable-chunked-prefill",)}
    budgets |= {
        f"{budget:,} tokens": ("--max-num-batched-tokens", str(budget))
        for budget in (512, 2048, 8192)
    }
    found: dict[str, Any] = {}
    for name, flags in budgets.items():
        say(f"throughput, {name}")
        async with _setup(arguments, *ONE_PROCESS, *flags) as setup, setup.target() as target:
            await run_closed(target, single(2, SEED + 1, *SHORT), 2)
            outcomes = await run_closed(target, mixed_sessions(arguments.requests), 8)
        found[name] = _throughput_of(outcomes)
    base = found["no chunks"]["tokens_per_s"]
    more = {name: row["tokens_per_s"] / base - 1 for name, row in found.items()}
    best = max(more.values())
    return {
        "load": {
            "requests": arguments.requests,
            "concurrency": 8,
            "a_quarter": f"{LONG[0]} in, {LONG[1]} out",
            "the_others": f"{SHORT[0]} in, {SHORT[1]} out",
        },
        "setups": found,
        "more_than_no_chunks": more,
        "verdict": f"{100 * best:+.0f} % at best; the usual claim is about +50 %",
    }


def mixed_sessions(num: int) -> list[Session]:
    """Every fourth one long."""
    long, short = (single(num, SEED + 2 + i, *size) for i, size in enumerate((LONG, SHORT)))
    return [(long if i % 4 == 0 else short)[i] for i in range(num)]


def _throughput_of(outcomes: Sequence[Outcome]) -> dict[str, float]:
    summary = summarise(outcomes, TARGETS)
    total = summary.prompt_tokens + summary.output_tokens
    return {
        "tokens_per_s": total / summary.duration_s,
        "output_tokens_per_s": summary.output_tokens_per_s,
        "answered": summary.num_ok,
    }


# ---------------------------------------------------------------- pictures


def draw_stalls(found: dict[str, Any], path: Path) -> None:
    load = found["load"]
    figure = new_figure(
        "What a long prompt does to running streams",
        f"{load['streams']} streams; prompts of {load['prompt_tokens']:,} tokens,"
        f" {load['prompts_per_s']:g} a second; SmolLM2 on {_cores()} cores in all",
        2,
    )
    figure.subplots_adjust(left=0.2, wspace=0.1)
    gaps, waits = figure.axes
    setups = found["setups"]
    bars(gaps, {n: s["itl_ms"]["p99"] for n, s in setups.items()},
         "inter-token latency of the streams, p99", " ms")  # fmt: skip
    bars(waits, {n: s["prompt_ttft_ms"]["p50"] for n, s in setups.items()},
         "time to first token of the long prompts, p50", " ms")  # fmt: skip
    waits.set_yticks([])
    save(figure, path)


def draw_goodput(found: dict[str, Any], path: Path) -> None:
    load = found["load"]
    figure = new_figure(
        "Requests inside both targets",
        f"TTFT {load['ttft_target_ms']:,.0f} ms and TPOT {load['tpot_target_ms']:,.0f} ms;"
        f" {load['prompt_tokens_mean']} tokens in and {load['output_tokens_mean']} out, on average",
        2,
    )
    share, good = figure.axes
    setups = found["setups"]
    for axes, key, heading, scale in (
        (share, "share_inside", "% of the requests", 100.0),
        (good, "good_per_s", "good requests a second", 1.0),
    ):
        series = {
            name: [(float(rate), scale * value) for rate, value in row[key].items()]
            for name, row in setups.items()
        }
        lines(axes, series, heading, "requests a second", (False, False))
    share.axhline(100 * SHARE_INSIDE, color="#6f6f6b", linewidth=1, linestyle=":")
    save(figure, path)


def draw_throughput(found: dict[str, Any], path: Path) -> None:
    figure = new_figure(
        "Chunked prefill and throughput",
        "one process, 8 requests at once, a quarter of the prompts long",
        1,
    )
    figure.subplots_adjust(left=0.12)
    (axes,) = figure.axes
    rates = {name: row["tokens_per_s"] for name, row in found["setups"].items()}
    bars(axes, rates, "tokens a second, in and out")
    save(figure, path)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


# ---------------------------------------------------------------- all of it

PARTS = {
    "stalls": (stalls, draw_stalls),
    "goodput": (goodput, draw_goodput),
    "throughput": (throughput, draw_throughput),
}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "setup": {
            "model": arguments.model,
            "cores": _cores(),
            "threads_one_process": threads_per_engine(1),
            "threads_a_pool": threads_per_engine(2),
        }
    }
    for name, (part, draw) in PARTS.items():
        if arguments.part in (name, "all"):
            result[name] = rounded(await part(arguments))
            if arguments.plot:
                draw(result[name], Path(f"{arguments.plot}-{name}.png"))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--plot", help="pictures to write, as PREFIX-<part>.png")
    parser.add_argument("--model", default="default")
    parser.add_argument("--num-blocks", type=int, default=1200, help="of each worker")
    parser.add_argument("--streams", type=int, default=16, help="stalls: that decode all the time")
    parser.add_argument("--prompt", type=int, default=1024, help="stalls: tokens of a long prompt")
    parser.add_argument("--rate", type=float, default=0.18, help="stalls: long prompts a second")
    parser.add_argument("--duration", type=float, default=50, help="stalls: seconds a set-up")
    parser.add_argument("--rates", default="0.5,0.75,1,1.25,1.5", help="goodput: requests a second")
    parser.add_argument("--seconds", type=float, default=20, help="goodput: at each rate")
    parser.add_argument("--goodput-prompt", type=int, default=256, help="mean tokens")
    parser.add_argument("--goodput-output", type=int, default=32, help="mean tokens")
    parser.add_argument("--requests", type=int, default=24, help="throughput: in all")
    with suppress(KeyboardInterrupt):
        print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
