"""`baton bench roofline`: under which of the machine's two roofs each phase is.

1. The roofs are measured: FLOP/s of a large matrix product, bytes/s of a large copy, with as many
   threads as an engine gets.
2. A prefill and a decode worker start. Prompts of several lengths run alone, then streams decode,
   so many at once.
3. Their traces say what each phase did: FLOPs and bytes by the model's own arithmetic, and how long
   it took. A point is (FLOPs a byte, FLOP/s) of the engine (Williams, Waterman, Patterson 2009).
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from cli.bench.load import run_closed
from cli.bench.plot import COLOURS, INK, SOFT, new_figure, save, style
from cli.bench.progress import Steps, progress
from cli.bench.report import rounded
from cli.bench.setup import Setup, baton
from cli.bench.workloads import single
from cli.kv_waste.plot import check_plot
from cli.launch_plan import threads_per_engine
from cli.otlp import TraceSpan
from cli.output import print_json, print_plain
from common.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PROMPTS = (16, 64, 256, 1024)
_STREAMS = (1, 4, 16)
_STREAM_PROMPT, _STREAM_OUTPUT = 32, 48
_NUM_ENGINES = 2
# Spans are sent in batches.
_SETTLE_S = 1.0
_MATRIX = 1536
_COPY_BYTES = 1 << 28
_TRIES = 12


@dataclass(frozen=True, slots=True)
class Roofs:
    """Of so many threads: FLOP/s in fp32, and bytes/s read plus written."""

    threads: int
    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte above which compute is the limit."""
        return self.flops_per_s / self.bytes_per_s

    def at(self, intensity: float) -> float:
        return min(self.flops_per_s, intensity * self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Point:
    """One phase of one load: the work of all its requests, and how long the engine took."""

    phase: str
    label: str
    flops: float
    num_bytes: float
    duration_s: float

    @property
    def intensity(self) -> float:
        return self.flops / self.num_bytes

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.duration_s

    def as_json(self, roofs: Roofs) -> dict[str, Any]:
        return {
            **asdict(self),
            "intensity": self.intensity,
            "flops_per_s": self.flops_per_s,
            "of_the_roof": self.flops_per_s / roofs.at(self.intensity),
            "limit": "compute" if self.intensity > roofs.ridge else "memory",
        }


def roofline(
    model: Annotated[str, typer.Option(help="as for `baton up`")] = "default",
    plot: Annotated[Path | None, typer.Option(help="picture to write: .png, .svg, .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="everything as JSON")] = False,
) -> None:
    """Both phases against this machine's roofs: how many FLOPs a byte, and how fast."""
    if plot is not None:
        check_plot(plot)
    roofs = measure_roofs(threads_per_engine(_NUM_ENGINES))
    points = asyncio.run(_measure(model))
    if plot is not None:
        _draw(roofs, points, plot)
    if as_json:
        content = {
            "roofs": {**asdict(roofs), "ridge": roofs.ridge},
            "points": [point.as_json(roofs) for point in points],
        }
        print_json(rounded(content))
        return
    print_plain(_table(roofs, points))


def measure_roofs(threads: int) -> Roofs:
    """The best of some tries each; needs a few hundred MB for a second."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b = torch.rand(_MATRIX, _MATRIX), torch.rand(_MATRIX, _MATRIX)
        product_s = _best_s(lambda: a @ b)
        source = torch.rand(_COPY_BYTES // 4)
        target = torch.empty_like(source)
        copy_s = _best_s(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(before)
    return Roofs(threads, 2 * _MATRIX**3 / product_s, 2 * _COPY_BYTES / copy_s)


def _best_s(work: Callable[[], object]) -> float:
    work()
    times_s = []
    for _ in range(_TRIES):
        start_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


async def _measure(model: str) -> list[Point]:
    """Raises ConfigError for a model whose spans tell no FLOPs."""
    points: list[Point] = []
    with progress() as steps:
        async with baton("--model", model, "--local-prefill", "never") as setup:
            for num_tokens in _PROMPTS:
                # The first ones of a size warm up.
                *_, spans = await _run(setup, 3, num_tokens, 1, 1, steps)
                points.append(point_of("prefill", f"{num_tokens:,} tokens", spans))
            for num in _STREAMS:
                traces = await _run(setup, num, _STREAM_PROMPT, _STREAM_OUTPUT, num, steps)
                spans = [span for trace in traces for span in trace]
                points.append(point_of("decode", f"{num} at once", spans))
    return points


async def _run(
    setup: Setup, num: int, prompt: int, output: int, at_once: int, steps: Steps
) -> list[list[TraceSpan]]:
    """The spans of each of ``num`` requests. One of a single token ends with its prefill."""
    sessions = single(num, prompt * 1000 + num, prompt, output)
    async with setup.target() as target:
        with steps.step(f"{prompt} tokens in, {output} out, {at_once} at once", num) as on_end:
            outcomes = await run_closed(target, sessions, at_once, on_end)
    await asyncio.sleep(_SETTLE_S)
    return [await setup.spans(outcome.trace_id) for outcome in outcomes]


def point_of(phase: str, label: str, spans: list[TraceSpan]) -> Point:
    """From the first start to the last end of what the engine did in this phase."""
    name = "prefill.chunk" if phase == "prefill" else "decode.run"
    parts = [span for span in spans if span.name == name]
    flops = sum(float(span.attributes.get("baton.flops", 0)) for span in parts)
    num_bytes = sum(float(span.attributes.get("baton.bytes", 0)) for span in parts)
    if not flops or not num_bytes:
        raise ConfigError("model", f"its {phase} spans tell no FLOPs; take one that computes")
    start_ns, end_ns = min(p.start_ns for p in parts), max(p.end_ns for p in parts)
    return Point(phase, label, flops, num_bytes, (end_ns - start_ns) / 1e9)


# ---------------------------------------------------------------- shown


def _table(roofs: Roofs, points: list[Point]) -> Table:
    title = (
        f"{roofs.threads} thread(s): {roofs.flops_per_s / 1e9:.0f} GFLOP/s,"
        f" {roofs.bytes_per_s / 1e9:.1f} GB/s, ridge at {roofs.ridge:.1f} FLOPs a byte"
    )
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for name in ("phase", ""):
        table.add_column(name, header_style="bold")
    for name in ("FLOPs/byte", "GFLOP/s", "% of the roof", "limit"):
        table.add_column(name, header_style="bold", justify="right")
    for point in points:
        row = point.as_json(roofs)
        table.add_row(
            point.phase,
            point.label,
            f"{point.intensity:.1f}",
            f"{point.flops_per_s / 1e9:.1f}",
            f"{100 * row['of_the_roof']:.0f}",
            row["limit"],
        )
    return table


def _draw(roofs: Roofs, points: list[Point], path: Path) -> None:
    figure = new_figure(
        "Which roof each phase is under",
        f"an engine of {roofs.threads} thread(s); FLOPs and bytes by the model's own arithmetic,"
        " from the traces",
        1,
        width=9.0,
    )
    (axes,) = figure.axes
    _draw_roofs(axes, roofs, points)
    for phase, colour in (("prefill", COLOURS[0]), ("decode", COLOURS[1])):
        members = [point for point in points if point.phase == phase]
        xs = [point.intensity for point in members]
        ys = [point.flops_per_s / 1e9 for point in members]
        axes.plot(xs, ys, color=colour, marker="o", linewidth=1.2, label=phase)
        for point, x, y in zip(members, xs, ys, strict=True):
            # Slanted: points of one phase may lie close to each other.
            axes.annotate(
                point.label, (x, y), (3, -7), textcoords="offset points", fontsize=9, color=INK,
                rotation=-65, rotation_mode="anchor", va="center",
            )  # fmt: skip
    axes.set_xlabel("FLOPs a byte", color=SOFT)
    axes.legend(frameon=False, loc="lower right")
    style(axes, "GFLOP/s")
    save(figure, path)


def _draw_roofs(axes: "Axes", roofs: Roofs, points: list[Point]) -> None:
    low = min([roofs.ridge, *(point.intensity for point in points)]) / 2
    high = max([roofs.ridge, *(point.intensity for point in points)]) * 3
    middle = math.sqrt(low * roofs.ridge)
    xs = [low, roofs.ridge, high]
    axes.plot(xs, [roofs.at(x) / 1e9 for x in xs], color=SOFT, linewidth=2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.annotate(
        f"compute: {roofs.flops_per_s / 1e9:,.0f} GFLOP/s", (high, roofs.flops_per_s / 1e9),
        (-4, 6), textcoords="offset points", ha="right", color=SOFT, fontsize=9.5,
    )  # fmt: skip
    axes.annotate(
        f"memory: {roofs.bytes_per_s / 1e9:,.1f} GB/s", (middle, roofs.at(middle) / 1e9),
        (-8, 8), textcoords="offset points", ha="right", color=SOFT, fontsize=9.5,
    )  # fmt: skip
    heights = [p.flops_per_s / 1e9 for p in points]
    axes.set_ylim(min(heights) / 2.5, 2 * max(roofs.flops_per_s / 1e9, *heights))
