"""The replays' outcomes as numbers for programs and as a table for people."""

from dataclasses import dataclass
from typing import Any

from rich.table import Table

from cli.kv_waste.replay import WASTE, Outcome
from cli.kv_waste.workload import STEP_MS, Workload
from common.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class Report:
    """``source``: where the lengths come from. ``token_bytes``: of one token's keys and values."""

    workload: Workload
    source: str
    memory_bytes: int
    token_bytes: int
    block_size: int
    outcomes: tuple[Outcome, ...]

    @property
    def num_slots(self) -> int:
        return self.memory_bytes // self.token_bytes

    def title(self) -> str:
        workload = self.workload
        return (
            f"{workload.name}: {len(workload.requests):,} requests of at most "
            f"{workload.max_len:,} tokens, in KV memory for {self.num_slots:,} tokens "
            f"({format_bytes(self.memory_bytes)})"
        )

    def as_json(self) -> dict[str, Any]:
        workload = self.workload
        return {
            "workload": {
                "name": workload.name,
                "source": self.source,
                "requests": len(workload.requests),
                "refused": workload.num_refused,
                "max_len": workload.max_len,
                "mean_input": _mean([r.num_prompt for r in workload.requests]),
                "mean_output": _mean([r.num_output for r in workload.requests]),
            },
            "memory_bytes": self.memory_bytes,
            "token_bytes": self.token_bytes,
            "memory_tokens": self.num_slots,
            "block_size": self.block_size,
            "step_ms": STEP_MS,
            "allocators": [self._outcome(outcome) for outcome in self.outcomes],
        }

    def _outcome(self, outcome: Outcome) -> dict[str, Any]:
        return {
            "name": outcome.policy,
            "shares": {kind: round(share, 6) for kind, share in outcome.shares.items()},
            "waste": round(outcome.waste, 6),
            "peak_bytes": outcome.peak_slots * self.token_bytes,
            "concurrent_mean": round(outcome.mean_running, 3),
            "concurrent_peak": outcome.peak_running,
            "preemptions": outcome.num_preemptions,
            "memory_ran_out": outcome.is_full,
            "steps": outcome.num_steps,
        }

    def table(self) -> Table:
        """A column for each policy: shares of the memory in percent, then what it served."""
        table = Table(box=None, pad_edge=False)
        table.add_column("% of the memory", header_style="bold")
        for outcome in self.outcomes:
            table.add_column(outcome.policy, header_style="bold", justify="right", no_wrap=True)
        rows = [{**outcome.shares, "waste, in sum": outcome.waste} for outcome in self.outcomes]
        for kind in ("used", *WASTE, "free", "waste, in sum"):
            table.add_row(kind, *(f"{100 * row[kind]:.1f}" for row in rows))
        table.add_row()
        table.add_row("requests at once", *(f"{o.mean_running:.1f}" for o in self.outcomes))
        table.add_row("  at most", *(str(o.peak_running) for o in self.outcomes))
        peaks = (format_bytes(o.peak_slots * self.token_bytes) for o in self.outcomes)
        table.add_row("peak memory", *peaks)
        table.add_row("preemptions", *(f"{o.num_preemptions:,}" for o in self.outcomes))
        return table

    def notes(self) -> list[str]:
        notes = [f"lengths: {self.source}"]
        if self.workload.num_refused:
            notes.append(f"{self.workload.num_refused:,} longer requests were refused (--max-len)")
        idle = [outcome.policy for outcome in self.outcomes if not outcome.is_full]
        if idle:
            notes.append(f"memory never ran out for {', '.join(idle)}: less --memory shows more")
        return notes


def _mean(values: list[int]) -> float:
    return round(sum(values) / len(values), 2)
