"""The report as a picture: where the memory goes, and how many requests it serves at once."""

from pathlib import Path
from typing import TYPE_CHECKING

from cli.kv_waste.replay import KINDS
from cli.kv_waste.report import Report
from common.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = (".png", ".svg", ".pdf")
# One strong colour for what is useful, a family of warm ones for the wastes, light grey for free.
_COLOURS = {
    "used": "#1f6f78",
    "duplication": "#8c4a6b",
    "reserved": "#e9c46a",
    "internal": "#e07a3f",
    "external": "#b23a2e",
    "free": "#e3e3e0",
}
_LABELS = {
    "used": "used",
    "duplication": "duplication",
    "reserved": "reserved",
    "internal": "internal fragmentation",
    "external": "external fragmentation",
    "free": "free",
}
_DARK_TEXT = {"reserved", "free"}
_INK, _SOFT = "#2b2b2b", "#6f6f6b"
# A narrower part of a bar has no room for its number.
_LEAST_LABELLED = 0.045
# The white edge of a narrower one would hide it.
_LEAST_EDGED = 0.01


def check_plot(path: Path) -> None:
    """Raises ConfigError, before anything is replayed, where no picture could be written."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError("plot", f"{path.name} must end in {', '.join(_FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError("plot", f"{path.absolute().parent} is no folder")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(
            "plot", "matplotlib is not installed; pip install 'baton-serve[plot]'"
        ) from None


def draw(report: Report, path: Path) -> None:
    """Writes the picture. Raises ConfigError where the file cannot be written."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 11, "text.color": _INK, "svg.hashsalt": "baton"}):
        figure = Figure(figsize=(12, 4.6), dpi=150, facecolor="white")
        shares, running = figure.subplots(1, 2, width_ratios=(3, 1.15), sharey=True)
        _draw_shares(shares, report)
        _draw_running(running, report)
        figure.subplots_adjust(left=0.125, right=0.965, top=0.66, bottom=0.03, wspace=0.06)
        figure.text(0.02, 0.93, "Where the KV memory goes", fontsize=16, weight="bold")
        figure.text(0.02, 0.865, report.title(), color=_SOFT)
        handles, labels = shares.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="upper left", bbox_to_anchor=(0.012, 0.835), ncols=len(labels),
            frameon=False, handlelength=1, handleheight=1, columnspacing=1.3, fontsize=10,
        )  # fmt: skip
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise ConfigError("plot", f"cannot write {path}: {error.strerror}") from None


def _draw_shares(axes: "Axes", report: Report) -> None:
    names = [outcome.policy for outcome in report.outcomes]
    starts = [0.0] * len(names)
    for kind in KINDS:
        widths = [outcome.shares[kind] for outcome in report.outcomes]
        if not any(width > 0.0005 for width in widths):
            continue
        axes.barh(
            names, widths, left=starts, height=0.62, color=_COLOURS[kind], label=_LABELS[kind],
            edgecolor="white", linewidth=[0.8 * (width > _LEAST_EDGED) for width in widths],
        )  # fmt: skip
        for row, (start, width) in enumerate(zip(starts, widths, strict=True)):
            if width >= _LEAST_LABELLED:
                axes.text(
                    start + width / 2, row, f"{100 * width:.0f}%", ha="center", va="center",
                    color=_INK if kind in _DARK_TEXT else "white",
                    weight="bold" if kind == "used" else "normal",
                )  # fmt: skip
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    _strip(axes)
    _head(axes, "share of the memory, mean over the time in which requests wait")


def _draw_running(axes: "Axes", report: Report) -> None:
    means = [outcome.mean_running for outcome in report.outcomes]
    names = [outcome.policy for outcome in report.outcomes]
    axes.barh(names, means, height=0.62, color=_COLOURS["used"])
    for row, mean in enumerate(means):
        factor = "" if row == 0 else f"{mean / means[0]:.1f}x"
        axes.annotate(
            f"{mean:.1f}", (mean, row), (6, 0), textcoords="offset points", va="center",
            weight="bold",
        )  # fmt: skip
        axes.annotate(
            factor, (mean, row), (44, 0), textcoords="offset points", va="center", color=_SOFT
        )
    axes.set_xlim(0, max(means) * 1.6)
    _strip(axes)
    _head(axes, "requests at once")


def _head(axes: "Axes", text: str) -> None:
    axes.set_title(text, color=_SOFT, fontsize=10, loc="left", pad=6)


def _strip(axes: "Axes") -> None:
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0, labelcolor=_INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
