"""The real gateway and workers under thousands of bad networks; and bugs that must be found there.

A failure names its seed: ``python -c "from sim.schedule import run_schedule; run_schedule(SEED)"``
from ``tests/`` runs it again.
"""

import gc
import logging
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from sim.bugs import BUGS
from sim.schedule import Violation, run_schedule

NUM_SCHEDULES = 2_000
NUM_SCHEDULES_FULL = 100_000
BATCH = 50
# Every planted bug must show within so many schedules.
BUG_SCHEDULES = 400


def prepare() -> None:
    """Of a process that runs batches, once."""
    logging.disable()  # they lose workers all the time
    gc.collect()
    gc.freeze()  # what was imported is never garbage: a tenth of the time


def run_batch(first: int) -> list[str]:
    """Violations among the schedules ``first``..``first + BATCH``."""
    found = []
    for seed in range(first, first + BATCH):
        try:
            run_schedule(seed)
        except Violation as violation:
            found.append(str(violation))
    return found


def run_many(first: int, num_schedules: int) -> list[str]:
    starts = range(first, first + num_schedules, BATCH)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), prepare) as pool:
        return [violation for batch in pool.map(run_batch, starts) for violation in batch]


@pytest.mark.timeout(400)
@pytest.mark.fault("F6", "F12", "F21")
def test_no_violation() -> None:
    assert run_many(0, NUM_SCHEDULES) == []


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
def test_no_violation_in_many() -> None:
    assert run_many(NUM_SCHEDULES, NUM_SCHEDULES_FULL) == []


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.fault("F6")
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant: Callable[[pytest.MonkeyPatch], None] = BUGS[name]
    plant(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(BUG_SCHEDULES):
            run_schedule(seed)


def test_a_schedule_is_a_function_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a seed that is printed with a failure would be worth nothing."""
    from sim import clock

    ends: list[float] = []

    class Recording(clock.VirtualClockLoop):
        def close(self) -> None:
            ends.append(self.time())
            super().close()

    monkeypatch.setattr(clock, "VirtualClockLoop", Recording)
    for _ in range(3):
        for seed in range(20):
            run_schedule(seed)
    assert ends[:20] == ends[20:40] == ends[40:]
