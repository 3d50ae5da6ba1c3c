"""`make soak`: faults in great number against real processes, and the figures of docs/soak.json.

    python -m faults.soak [--phases decode_kills,...] [--seconds S] [--seed N] [--figures FILE]

Each phase runs until it has reached its goal over all slices so far, or its share of the seconds is
over. Ends with status 1 if anything was ever wrong in a phase that ran.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from faults import figures as store
from faults import (
    soak_cancels,
    soak_chaos,
    soak_flips,
    soak_kills,
    soak_nats,
    soak_overload,
    soak_rolling,
    soak_steady,
)
from faults.stage import Stage

Phase = Callable[[Stage], Awaitable[None]]

PHASES: dict[str, Phase] = {
    "decode_kills": soak_kills.decode_kills,
    "prefill_kills": soak_kills.prefill_kills,
    "cancels": soak_cancels.cancels,
    "flips": soak_flips.flips,
    "nats": soak_nats.nats,
    "rolling": soak_rolling.rolling,
    "overload": soak_overload.overload,
    "chaos": soak_chaos.chaos,
    "steady": soak_steady.steady,
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--phases", default=",".join(PHASES), help="which, commas between them")
    parser.add_argument("--seconds", type=float, default=7200.0, help="of all phases together")
    parser.add_argument("--seed", type=int, default=None, help="default: by the clock")
    parser.add_argument("--figures", type=Path, default=Path("docs/soak.json"))
    asked = parser.parse_args(arguments)
    seed = asked.seed if asked.seed is not None else int(time.time()) % 1_000_000
    names = asked.phases.split(",")
    # What was counted so far is kept, and what was started is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    is_right = True
    for number, name in enumerate(names):
        seconds = asked.seconds / len(names)
        is_right &= asyncio.run(_run(name, seed + number, seconds, asked.figures))
    return 0 if is_right else 1


async def _run(name: str, seed: int, seconds: float, path: Path) -> bool:
    phases = store.load(path)
    figures = phases.setdefault(name, store.Figures())
    before = figures.counts.copy()
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    with TemporaryDirectory(prefix="soak-") as folder:
        stage = Stage(seed, begun_s + seconds, Path(folder), figures)
        try:
            await PHASES[name](stage)
        finally:
            if figures.counts != before:
                figures.slices.append(_slice(seed, loop.time() - begun_s))
                store.save(path, phases)
    print(f"{name}, seed {seed}: {dict(figures.counts)}")
    for sample, values in figures.samples.items():
        marks = [f"p{p} {store.percentile(values, p):.3f}" for p in (50, 95, 99)]
        print(f"  {sample}: {len(values)} values, {', '.join(marks)}, largest {max(values):.3f}")
    for example in figures.examples:
        print(f"  WRONG: {example}")
    return not any(figures.counts[fault] for fault in store.FAULTS)


def _slice(seed: int, spent_s: float) -> dict[str, str | int | float]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "seed": seed,
        "seconds": round(spent_s),
        "machine": store.machine(),
        "commit": store.commit(),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
