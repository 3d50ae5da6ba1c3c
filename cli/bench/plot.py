"""Pictures of measurements: lines over a measured axis, bars beside each other."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# As in `baton kv-waste`'s pictures; the first is for what the picture is about.
COLOURS = ("#1f6f78", "#e07a3f", "#8c4a6b", "#c99a1e", "#6f6f6b")
INK, SOFT, GRID = "#2b2b2b", "#6f6f6b", "#e3e3e0"

Points = Sequence[tuple[float, float]]


def new_figure(title: str, subtitle: str, num_axes: int, width: float = 10.0) -> "Figure":
    """A figure with a heading and so many axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.8), dpi=150, facecolor="white")
    figure.subplots(1, num_axes, squeeze=False)
    figure.subplots_adjust(left=0.075, right=0.96, top=0.74, bottom=0.13, wspace=0.24)
    figure.text(0.02, 0.925, title, fontsize=16, weight="bold", color=INK)
    figure.text(0.02, 0.86, subtitle, color=SOFT, fontsize=10.5)
    return figure


def lines(
    axes: "Axes", series: Mapping[str, Points], heading: str, x: str, log: tuple[bool, bool]
) -> None:
    """Each series labelled in a legend; ``log`` says which axes are logarithmic."""
    for colour, (name, points) in zip(COLOURS, series.items(), strict=False):
        if points:
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, color=colour, label=name, marker="o", markersize=4, linewidth=2)
    if log[0]:
        axes.set_xscale("log", base=2)
    if log[1]:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    ticks = sorted({x for points in series.values() for x, _ in points})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(x, color=SOFT)
    axes.legend(frameon=False, fontsize=9.5)
    style(axes, heading)


def bars(axes: "Axes", values: Mapping[str, float], heading: str, unit: str = "") -> None:
    """A bar each with its number behind it; the first name stands on top."""
    names = list(values)
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(names))]
    axes.barh(names, list(values.values()), height=0.6, color=colours)
    for row, value in enumerate(values.values()):
        axes.annotate(
            f"{value:,.3g}{unit}" if value < 1000 else f"{value:,.0f}{unit}", (value, row), (6, 0),
            textcoords="offset points", va="center", weight="bold", color=INK,
        )  # fmt: skip
    axes.set_xlim(0, 1.25 * max([*values.values(), 1e-9]))
    axes.invert_yaxis()
    style(axes, heading)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=INK)


def style(axes: "Axes", heading: str) -> None:
    axes.set_title(heading, color=SOFT, fontsize=10.5, loc="left", pad=8)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, which="both")
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(GRID)


def save(figure: "Figure", path: Any) -> None:
    """``path`` is a path or an open file. Raises ConfigError where it cannot be written."""
    try:
        if isinstance(path, Path):
            figure.savefig(path)
        else:
            figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError("plot", f"cannot write {path}: {error.strerror}") from None
