"""The published figures: counts and samples that slices of a soak add up to, in one JSON file.

::

    {"decode_kills": {"counts": {"kills": 200, "wrong": 0, ...},
                      "samples": {"pause_s": [0.31, ...]},
                      "slices": [{"date", "seed", "seconds", "machine", "commit"}, ...],
                      "examples": ["seed 7: ...", ...]}, ...}

A slice is one run of one phase; it reads what was there, adds to it and writes the file anew, so a
soak can be stopped and taken up again at any time.
"""

import json
import math
import os
import platform
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

_MAX_EXAMPLES = 20
# What each phase counts, and how many of it are to be published.
GOALS = {
    "decode_kills": ("kills", 200),
    "prefill_kills": ("kills", 200),
    "cancels": ("cancels", 10_000),
    "flips": ("flips", 240),
    "nats": ("kills", 10),
    "rolling": ("rounds", 3),
    "overload": ("rounds", 3),
    "chaos": ("periods", 60),
    "steady": ("minutes", 60),
}
# Anything but zero in one of these is a fault.
FAULTS = ("wrong", "leaked", "lost", "undetected", "false_alarms")


@dataclass
class Figures:
    """Of one phase."""

    counts: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[float]] = field(default_factory=dict)
    slices: list[dict[str, str | int | float]] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)

    def sample(self, name: str, value: float) -> None:
        self.samples.setdefault(name, []).append(round(value, 4))

    def example(self, text: str) -> None:
        """One that went wrong; only the first few are kept."""
        if len(self.examples) < _MAX_EXAMPLES:
            self.examples.append(text)


def load(path: Path) -> dict[str, Figures]:
    if not path.exists():
        return {}
    phases = json.loads(path.read_text())
    return {
        name: Figures(**{**values, "counts": Counter(values["counts"])})
        for name, values in phases.items()
    }


def save(path: Path, phases: dict[str, Figures]) -> None:
    """Whole or not at all."""
    text = json.dumps({name: vars(figures) for name, figures in phases.items()}, indent=1)
    beside = path.with_suffix(".new")
    beside.write_text(text + "\n")
    beside.replace(path)


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that ``percent`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Linux"


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
