"""One HTML page with everything in it: the picture, the figures, the settings."""

import base64
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.bench.plot import save
from cli.bench.report import as_json, headline
from cli.bench.summary import Summary
from common.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #2b2b2b; max-width: 72rem; margin: 2rem auto;
       padding: 0 1rem }
h1 { font-size: 1.4rem } img { width: 100% }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .25rem 1rem .25rem 0; text-align: right; border-bottom: 1px solid #e3e3e0 }
th:first-child, td:first-child { text-align: left }
td:first-child { color: #6f6f6b } pre { background: #f6f6f4; padding: 1rem; overflow: auto }
"""
_ROWS = {
    "time to first token": "ttft_ms",
    "time per output token": "tpot_ms",
    "inter-token latency": "itl_ms",
    "end to end": "e2e_ms",
}


def write_page(path: Path, figure: "Figure", summary: Summary, settings: Mapping[str, Any]) -> None:
    """Raises ConfigError where it cannot be written."""
    try:
        path.write_text(page(figure, summary, settings), encoding="utf-8")
    except OSError as error:
        raise ConfigError("html", f"cannot write {path}: {error.strerror}") from None


def page(figure: "Figure", summary: Summary, settings: Mapping[str, Any]) -> str:
    picture = io.BytesIO()
    save(figure, picture)
    source = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    spreads = {name: getattr(summary, field) for name, field in _ROWS.items()}
    latencies = [
        (name, *(f"{value:,.1f}" for value in asdict(spread).values()))
        for name, spread in spreads.items()
        if spread is not None
    ]
    content = json.dumps({"settings": dict(settings), **as_json(summary)}, indent=2)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>baton bench</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>baton bench serve</h1>\n<p>{escape(headline(summary))}</p>\n"
        f'<img alt="latencies" src="{source}">\n'
        f"{_table(('ms', 'mean', 'p50', 'p90', 'p99'), latencies)}"
        f"{_table(('setting', ''), ((k, str(v)) for k, v in settings.items()))}"
        f"<details><summary>JSON</summary><pre>{escape(content)}</pre></details>\n"
        "</body></html>\n"
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>\n"
