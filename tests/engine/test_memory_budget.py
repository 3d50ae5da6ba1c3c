"""The share of a GPU that becomes KV blocks, with several workers on one GPU."""

from itertools import permutations

import pytest

from common.errors import ConfigError
from engine.memory_budget import MemoryUse, measure

GIB = 1 << 30
BLOCK = 2 << 20


class SharedGpu:
    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0


class FakeMemory:
    """One process' view of a GPU; its context is there from the first call on."""

    def __init__(self, gpu: SharedGpu, context: int) -> None:
        self._gpu = gpu
        self._context = context
        self._allocated = 0
        self._peak = 0
        gpu.used += context

    def take(self, num_bytes: int) -> None:
        self._allocated += num_bytes
        self._gpu.used += num_bytes
        self._peak = max(self._peak, self._allocated)

    def total_bytes(self) -> int:
        return self._gpu.total

    def free_bytes(self) -> int:
        return self._gpu.total - self._gpu.used

    def allocated_bytes(self) -> int:
        return self._allocated

    def peak_bytes(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self._allocated

    def context_bytes(self) -> int:
        return self._context


def start_worker(gpu: SharedGpu, weights: int, utilization: float) -> int:
    """As a worker starts: weights, scratch pool, a step with its peak, graphs; then the pool."""
    memory = FakeMemory(gpu, context=GIB // 2)
    memory.take(weights)
    memory.take(GIB // 4)

    def step() -> None:
        memory.take(3 * GIB)
        memory.take(-3 * GIB)

    def capture() -> int:
        return GIB // 8

    use = measure(memory, GIB // 4, step, capture)
    assert use == MemoryUse(GIB // 2, weights, 3 * GIB, GIB // 8)
    memory.take(-GIB // 4)
    num_blocks = use.num_blocks(memory, utilization, BLOCK)
    memory.take(GIB // 8 + num_blocks * BLOCK)
    return num_blocks


def test_sizes_do_not_depend_on_the_order_of_starts() -> None:
    workers = {"prefill": (4 * GIB, 0.3), "decode": (4 * GIB, 0.4), "small": (GIB, 0.2)}
    sizes = []
    for order in permutations(workers):
        gpu = SharedGpu(80 * GIB)
        counts = {name: start_worker(gpu, *workers[name]) for name in order}
        assert gpu.used <= 0.9 * gpu.total
        sizes.append(counts)
    assert all(counts == sizes[0] for counts in sizes)
    share = int(0.3 * 80 * GIB)
    assert sizes[0]["prefill"] == (share - 7 * GIB - GIB // 2 - GIB // 8) // BLOCK


def test_a_share_that_holds_no_block_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"0\.1 of 40960 MiB is 4096 MiB; context 512 MiB, wei"):
        start_worker(SharedGpu(40 * GIB), 4 * GIB, 0.1)


def test_shares_that_add_up_to_more_than_the_device_are_refused() -> None:
    gpu = SharedGpu(80 * GIB)
    start_worker(gpu, 4 * GIB, 0.7)
    with pytest.raises(ConfigError, match=r"MiB are free on the device: its workers' shares"):
        start_worker(gpu, 4 * GIB, 0.7)
