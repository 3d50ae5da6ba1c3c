"""Summaries as numbers for programs and as a table for people."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from cli.bench.summary import Spread, Summary


def rounded(content: Any) -> Any:
    """As JSON has it: no more digits than mean something, at any depth."""
    if isinstance(content, float):
        return round(content, 4)
    if isinstance(content, Mapping):
        return {key: rounded(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [rounded(value) for value in content]
    return content


def as_json(summary: Summary) -> dict[str, Any]:
    return dict(rounded(asdict(summary)))


def latency_table(summary: Summary) -> Table:
    """One load: its latencies."""
    table = Table(box=None, pad_edge=False)
    table.add_column("ms", header_style="bold")
    for name in ("mean", "p50", "p90", "p99"):
        table.add_column(name, header_style="bold", justify="right")
    rows = {
        "time to first token": summary.ttft_ms,
        "time per output token": summary.tpot_ms,
        "inter-token latency": summary.itl_ms,
        "end to end": summary.e2e_ms,
    }
    for name, row in rows.items():
        if row is not None:
            table.add_row(name, *(f"{value:,.1f}" for value in asdict(row).values()))
    return table


def headline(summary: Summary) -> str:
    parts = [f"{summary.num_ok} of {summary.num_requests} requests answered"]
    if summary.num_refused:
        parts.append(f"{summary.num_refused} refused")
    if summary.num_failed:
        parts.append(f"{summary.num_failed} failed")
    parts.append(f"{summary.requests_per_s:.2f} requests/s")
    parts.append(f"{summary.output_tokens_per_s:.1f} output tokens/s")
    parts.append(f"goodput {summary.goodput:.2f} requests/s")
    return ", ".join(parts)


def comparison_table(
    rows: Iterable[tuple[str, Summary]], extra: Mapping[str, Iterable[str]] | None = None
) -> Table:
    """Several loads, a row each; ``extra`` adds columns."""
    extra = extra or {}
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("", header_style="bold", no_wrap=True)
    columns = ("answered", "refused", "good/s", "tokens/s", "TTFT p50/p99", "TPOT")
    for name in (*columns, *extra):
        table.add_column(name, header_style="bold", justify="right", no_wrap=True)
    more = [list(column) for column in extra.values()]
    for number, (name, summary) in enumerate(rows):
        table.add_row(
            name,
            f"{summary.num_ok}/{summary.num_requests}",
            str(summary.num_refused),
            f"{summary.goodput:.2f}",
            f"{summary.output_tokens_per_s:.1f}",
            f"{_ms(summary.ttft_ms, 'p50')}/{_ms(summary.ttft_ms, 'p99')}",
            _ms(summary.tpot_ms, "p50"),
            *(column[number] for column in more),
        )
    return table


def _ms(spread: Spread | None, name: str) -> str:
    return "-" if spread is None else f"{getattr(spread, name):,.0f}"
