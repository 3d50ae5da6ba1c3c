"""`baton bench sweep`: time to first token against concurrency, for a naive engine and for ours.

The naive engine is one process that reserves a buffer of the maximum length for each request
(``--allocator contiguous``); beside it stand one process with pages, and two pools. All have the
same cores, and each worker the same KV memory.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.bench.load import run_closed
from cli.bench.plot import lines, new_figure, save
from cli.bench.progress import Steps, progress
from cli.bench.report import as_json as summary_json
from cli.bench.report import comparison_table
from cli.bench.setup import Setup, baton
from cli.bench.summary import Spread, Summary, Targets, summarise
from cli.bench.workloads import random_lengths
from cli.kv_waste.plot import check_plot
from cli.output import print_json, print_plain
from common.errors import ConfigError
from common.sizes import parse_bytes

_ONE_PROCESS = ("--prefill", "0", "--decode", "0", "--colocated", "1")
SETUPS = {
    "contiguous buffers": (*_ONE_PROCESS, "--allocator", "contiguous"),
    "pages": _ONE_PROCESS,
    "two pools": ("--prefill", "1", "--decode", "1"),
}
_LEAST_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    model: str
    memory_bytes: int
    max_model_len: int
    prompt: int
    output: int
    levels: tuple[int, ...]
    targets: Targets
    seed: int

    def flags(self, setup: Sequence[str]) -> list[str]:
        return [
            "--model", self.model, "--kv-cache-memory-bytes", str(self.memory_bytes),
            "--max-model-len", str(self.max_model_len), *setup,
        ]  # fmt: skip


def sweep(
    concurrency: Annotated[str, typer.Option(help="requests at once, a run each")] = "1,2,4,8,16",
    model: Annotated[str, typer.Option(help="as for `baton up`")] = "default",
    memory: Annotated[str, typer.Option(help="KV memory of each worker")] = "256MiB",
    max_model_len: Annotated[int, typer.Option(min=2, help="longest prompt + output")] = 2048,
    prompt: Annotated[int, typer.Option(min=1, help="mean tokens of a prompt")] = 96,
    output: Annotated[int, typer.Option(min=1, help="mean tokens of an output")] = 32,
    ttft: Annotated[float, typer.Option(min=1, help="target, ms")] = 3000.0,
    tpot: Annotated[float, typer.Option(min=1, help="target, ms")] = 200.0,
    seed: Annotated[int, typer.Option(min=0, help="of lengths and tokens")] = 0,
    plot: Annotated[Path | None, typer.Option(help="picture to write: .png, .svg, .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything as JSON")] = False,
) -> None:
    """Time to first token against concurrency: a naive engine, pages, and two pools."""
    if plot is not None:
        check_plot(plot)
    plan = Plan(
        model,
        parse_bytes(memory, "memory"),
        max_model_len,
        prompt,
        output,
        _levels(concurrency),
        Targets(ttft / 1000, tpot / 1000),
        seed,
    )
    found = asyncio.run(_sweep(plan))
    if plot is not None:
        _draw(plan, found, plot)
    if as_json:
        print_json({"settings": _settings(plan), "setups": _as_json(found)})
        return
    print_plain(
        comparison_table(
            (f"{name}, {level}", summary)
            for name, by_level in found.items()
            for level, summary in by_level.items()
        )
    )


Found = dict[str, dict[int, Summary]]


def _levels(text: str) -> tuple[int, ...]:
    try:
        levels = tuple(sorted({int(level) for level in text.split(",")}))
    except ValueError:
        raise ConfigError("concurrency", f"{text!r} is not numbers with commas between") from None
    if levels[0] < 1:
        raise ConfigError("concurrency", "must be at least 1")
    return levels


async def _sweep(plan: Plan) -> Found:
    found: Found = {}
    with progress() as steps:
        for name, setup_flags in SETUPS.items():
            async with baton(*plan.flags(setup_flags)) as setup:
                found[name] = {
                    level: await _at(setup, plan, name, level, steps) for level in plan.levels
                }
    return found


async def _at(setup: Setup, plan: Plan, name: str, level: int, steps: Steps) -> Summary:
    num = max(_LEAST_REQUESTS, 2 * level)
    async with setup.target() as target:
        warm_up = random_lengths(1, plan.seed, plan.prompt, plan.output, f"warm-up {level}")
        await run_closed(target, warm_up, 1)
        # The same lengths everywhere; other tokens at each level, which no cache holds.
        sessions = random_lengths(num, plan.seed, plan.prompt, plan.output, f"{level}")
        with steps.step(f"{name}, {level} at once", num) as on_end:
            outcomes = await run_closed(target, sessions, level, on_end)
    return summarise(outcomes, plan.targets)


def _draw(plan: Plan, found: Found, path: Path) -> None:
    figure = new_figure(
        "Time to first token against concurrency",
        f"{plan.prompt} tokens in and {plan.output} out on average; KV memory for each worker:"
        f" {plan.memory_bytes / 2**20:,.0f} MiB; longest request {plan.max_model_len:,} tokens",
        2,
    )
    first, rate = figure.axes
    ttft = {name: _points(by_level) for name, by_level in found.items()}
    lines(first, ttft, "time to first token, p50, ms", "requests at once", (True, False))
    tokens = {
        name: [(float(level), row.output_tokens_per_s) for level, row in by_level.items()]
        for name, by_level in found.items()
    }
    lines(rate, tokens, "output tokens a second", "requests at once", (True, False))
    legend = rate.get_legend()
    if legend is not None:
        legend.remove()
    save(figure, path)


def _points(by_level: dict[int, Summary]) -> list[tuple[float, float]]:
    spreads: dict[int, Spread | None] = {level: row.ttft_ms for level, row in by_level.items()}
    return [(float(level), spread.p50) for level, spread in spreads.items() if spread]


def _settings(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model,
        "memory_bytes": plan.memory_bytes,
        "max_model_len": plan.max_model_len,
        "prompt_tokens_mean": plan.prompt,
        "output_tokens_mean": plan.output,
        "seed": plan.seed,
    }


def _as_json(found: Found) -> dict[str, Any]:
    return {
        name: {str(level): summary_json(summary) for level, summary in by_level.items()}
        for name, by_level in found.items()
    }
