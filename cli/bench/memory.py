"""`baton bench memory`: how much KV memory a load needs, by trying.

For each size a whole Baton is started, and two loads of the same mean rate are played on it: steady
(Poisson arrivals) and bursty (so many at once, then quiet).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from cli.bench.load import run_closed, run_open
from cli.bench.progress import Steps, progress
from cli.bench.report import as_json, comparison_table
from cli.bench.setup import Setup, baton
from cli.bench.summary import Summary, Targets, summarise
from cli.bench.workloads import Session, bursts, poisson, random_lengths
from cli.output import print_json, print_plain
from common.errors import ConfigError
from common.sizes import format_bytes, parse_bytes

_NUM_WARMUP = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played on every size of memory."""

    model: str
    colocated: bool
    rate: float
    duration_s: float
    burst: int
    prompt: int
    output: int
    max_queued: int
    targets: Targets
    seed: int

    def loads(self) -> dict[str, tuple[list[Session], list[float]]]:
        """Sessions and arrivals by name; both have the same lengths, and no token in common that
        the second could find in a cache."""
        steady = poisson(self.duration_s, self.rate, self.seed)
        num = len(steady)
        arrivals = {"steady": steady, "bursty": bursts(num, self.rate, self.burst)}
        return {
            name: (random_lengths(num, self.seed, self.prompt, self.output, name), times)
            for name, times in arrivals.items()
        }

    def flags(self, num_bytes: int) -> list[str]:
        pools = ["--prefill", "0", "--decode", "0", "--colocated", "1"] if self.colocated else []
        return [
            "--model", self.model, *pools, "--kv-cache-memory-bytes", str(num_bytes),
            "--max-queued-requests", str(self.max_queued),
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    memory_bytes: int
    load: str
    num_preemptions: int
    summary: Summary

    def as_json(self) -> dict[str, Any]:
        return {
            "memory_bytes": self.memory_bytes,
            "load": self.load,
            "preemptions": self.num_preemptions,
            **as_json(self.summary),
        }


def memory(
    sizes: Annotated[
        str, typer.Option(help="KV memory of each worker, a run each")
    ] = "32MiB,64MiB,128MiB,256MiB",
    model: Annotated[str, typer.Option(help="as for `baton up`")] = "default",
    colocated: Annotated[
        bool, typer.Option("--colocated", help="one worker that does both phases, not two pools")
    ] = False,
    rate: Annotated[float, typer.Option(min=0.001, help="requests a second, mean of both")] = 1.0,
    duration: Annotated[float, typer.Option(min=1, help="seconds that a load arrives")] = 20.0,
    burst: Annotated[int, typer.Option(min=1, help="requests at once, in the bursty load")] = 10,
    prompt: Annotated[int, typer.Option(min=1, help="mean tokens of a prompt")] = 192,
    output: Annotated[int, typer.Option(min=1, help="mean tokens of an output")] = 64,
    max_queued: Annotated[int, typer.Option(min=1, help="more waiting ones are refused")] = 8,
    ttft: Annotated[float, typer.Option(min=1, help="target, ms")] = 4000.0,
    tpot: Annotated[float, typer.Option(min=1, help="target, ms")] = 200.0,
    seed: Annotated[int, typer.Option(min=0, help="of lengths, tokens and arrivals")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="everything as JSON")] = False,
) -> None:
    """Sweep the KV memory under a steady and a bursty load: preemptions, refusals, goodput."""
    num_bytes = [parse_bytes(size, "sizes") for size in sizes.split(",") if size.strip()]
    if not num_bytes:
        raise ConfigError("sizes", "name at least one, such as 64MiB")
    targets = Targets(ttft / 1000, tpot / 1000)
    plan = Plan(model, colocated, rate, duration, burst, prompt, output, max_queued, targets, seed)
    rows = asyncio.run(_sweep(plan, num_bytes))
    if as_json:
        print_json({"settings": _settings(plan), "rows": [row.as_json() for row in rows]})
        return
    names = [f"{format_bytes(row.memory_bytes)} {row.load}" for row in rows]
    preemptions = {"preempted": [str(row.num_preemptions) for row in rows]}
    summaries = [row.summary for row in rows]
    print_plain(comparison_table(zip(names, summaries, strict=True), preemptions))


async def _sweep(plan: Plan, sizes: Sequence[int]) -> list[Row]:
    rows = []
    with progress() as steps:
        for num_bytes in sizes:
            async with baton(*plan.flags(num_bytes)) as setup:
                rows += [
                    await _measure(setup, plan, name, num_bytes, steps) for name in plan.loads()
                ]
    return rows


async def _measure(setup: Setup, plan: Plan, load: str, num_bytes: int, steps: Steps) -> Row:
    sessions, arrivals = plan.loads()[load]
    async with setup.target() as target:
        warm_up = random_lengths(_NUM_WARMUP, plan.seed, plan.prompt, plan.output, "warm-up")
        await run_closed(target, warm_up, _NUM_WARMUP)
        before = setup.total("preemptions")
        with steps.step(f"{format_bytes(num_bytes)}, {load}", len(sessions)) as on_end:
            outcomes = await run_open(target, sessions, arrivals, on_end)
    preemptions = setup.total("preemptions") - before
    return Row(num_bytes, load, preemptions, summarise(outcomes, plan.targets))


def _settings(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model,
        "workers": "1 colocated" if plan.colocated else "1 prefill, 1 decode",
        "rate": plan.rate,
        "duration_s": plan.duration_s,
        "burst": plan.burst,
        "prompt_tokens_mean": plan.prompt,
        "output_tokens_mean": plan.output,
        "max_queued": plan.max_queued,
        "ttft_target_ms": plan.targets.ttft_s * 1000,
        "tpot_target_ms": plan.targets.tpot_s * 1000,
        "seed": plan.seed,
    }
