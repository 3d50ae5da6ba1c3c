"""Times on a GPU: medians of events, with the L2 cache swept in between; and profiles."""

import time
from collections.abc import Callable
from typing import Any

import torch

_SWEEP_BYTES = 256 << 20
_NUM_LISTED = 12


def first_call_s(call: Callable[[], object]) -> float:
    """Compilation, mostly."""
    start_s = time.monotonic()
    call()
    torch.cuda.synchronize()
    return time.monotonic() - start_s


def median_s(call: Callable[[], object], repeats: int = 20, sweeps: bool = True) -> float:
    """Device seconds of one call, after a few that warm up."""
    sweep = torch.empty(_SWEEP_BYTES if sweeps else 0, dtype=torch.int8, device="cuda")
    times = []
    for i in range(repeats + 3):
        sweep.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2]


def profile(call: Callable[[], object]) -> list[dict[str, Any]]:
    """The kernels of one call that took longest, in microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    return [
        {"kernel": event.key[:120], "count": event.count, "us": round(event.device_time_total, 1)}
        for event in events[:_NUM_LISTED]
    ]
