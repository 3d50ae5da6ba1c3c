"""What all commands print alike."""

import json
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from common.types import PhasesMs

# Columns where no terminal says how many: ids and addresses stay whole.
_FILE_WIDTH = 240


def print_json(content: Any) -> None:
    """One line on stdout, at once; with --json, nothing else goes there."""
    sys.stdout.write(json.dumps(content, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_text(text: str) -> None:
    """A model's text on stdout, at once. A model is not to steer a terminal."""
    if sys.stdout.isatty():
        text = "".join(char for char in text if char.isprintable() or char in "\n\t")
    sys.stdout.write(text)
    sys.stdout.flush()


def print_plain(content: RenderableType) -> None:
    """Tables and trees on stdout; without the blanks that fill up their lines where a program may
    read them."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(content)
        return
    console.width = _FILE_WIDTH
    with console.capture() as capture:
        console.print(content)
    lines = capture.get().splitlines()
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in lines))


def rounded_ms(milliseconds: float) -> float:
    """As JSON has them: no more digits than mean something."""
    return round(milliseconds, 1)


def phase_table(phases: PhasesMs) -> Table:
    """Where the milliseconds of one request went."""
    table = Table(box=None, pad_edge=False)
    table.add_column("phase", header_style="bold")
    table.add_column("ms", header_style="bold", justify="right")
    for name, value in asdict(phases).items():
        table.add_row(name.replace("_", " "), f"{value:.1f}")
    return table
