"""The picture of one load: how its latencies spread, and how they went over time."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cli.bench.load import Ending, Outcome
from cli.bench.plot import COLOURS, INK, SOFT, new_figure, style
from cli.bench.summary import Spread, Summary, Targets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(
    outcomes: Sequence[Outcome], summary: Summary, targets: Targets, settings: Mapping[str, Any]
) -> "Figure":
    subtitle = (
        f"{settings['dataset']}, {settings['arrivals']}: {summary.num_ok} of"
        f" {summary.num_requests} answered, {summary.requests_per_s:.2f} requests/s,"
        f" {summary.output_tokens_per_s:,.0f} output tokens/s, goodput {summary.goodput:.2f}/s"
    )
    figure = new_figure("Latency under load", subtitle, 3, width=13.0)
    first, between, over_time = figure.axes
    ok = [outcome for outcome in outcomes if outcome.ending is Ending.OK]
    _spread(first, [outcome.ttft_s for outcome in ok], summary.ttft_ms, "time to first token, ms")
    gaps = [gap_s for outcome in ok for gap_s in outcome.itl_s]
    _spread(between, gaps, summary.itl_ms, "inter-token latency, ms")
    _over_time(over_time, outcomes, targets)
    return figure


def _spread(axes: "Axes", times_s: Sequence[float], spread: Spread | None, heading: str) -> None:
    """Share of requests (or gaps) that were at most so long."""
    style(axes, f"{heading}: % at most")
    if spread is None:
        return
    times_ms = sorted(1000 * time_s for time_s in times_s)
    shares = [100 * (i + 1) / len(times_ms) for i in range(len(times_ms))]
    axes.step([times_ms[0], *times_ms], [0, *shares], where="post", color=COLOURS[0], linewidth=2)
    for name in ("p50", "p90", "p99"):
        value, height = getattr(spread, name), int(name[1:])
        axes.plot([value], [height], marker="o", markersize=5, color=COLOURS[1])
        axes.annotate(
            f"{name} {value:,.0f}", (value, height), (7, -11), textcoords="offset points",
            color=INK, fontsize=9.5,
        )  # fmt: skip
    axes.set_xlim(0, 1.3 * times_ms[-1])
    axes.set_ylim(0, 105)


def _over_time(axes: "Axes", outcomes: Sequence[Outcome], targets: Targets) -> None:
    """When requests began, and when their first token came."""
    begin_s = min(outcome.start_s for outcome in outcomes)
    groups: dict[str, tuple[str, list[Outcome]]] = {
        "inside both targets": (COLOURS[0], []),
        "outside": (COLOURS[1], []),
    }
    for outcome in outcomes:
        if outcome.ending is Ending.OK:
            groups["inside both targets" if targets.met(outcome) else "outside"][1].append(outcome)
    for name, (colour, members) in groups.items():
        if members:
            xs = [member.start_s - begin_s for member in members]
            ys = [1000 * member.ttft_s for member in members]
            axes.scatter(xs, ys, s=16, color=colour, label=name)
    refused = [o.start_s - begin_s for o in outcomes if o.ending is not Ending.OK]
    if refused:
        axes.scatter(refused, [0] * len(refused), s=22, marker="x", color=SOFT, label="no answer")
    axes.set_ylim(bottom=0)
    worst_s = max((outcome.ttft_s for outcome in outcomes if outcome.arrivals), default=0.0)
    if targets.ttft_s <= 1.5 * worst_s:
        axes.axhline(1000 * targets.ttft_s, color=SOFT, linewidth=1, linestyle=":")
    axes.set_xlabel("s since the start", color=SOFT)
    axes.legend(frameon=False, fontsize=9)
    style(axes, "time to first token over the run, ms")
