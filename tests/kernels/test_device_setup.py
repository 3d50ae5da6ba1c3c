"""Loading, measuring and building a runner as on a GPU, interpreted, with a stand-in for memory."""

import torch
from support.random_llama import CONFIG, GREEDY, Generation, poisoned_cache, tiny_model
from torch import Tensor

from engine.cuda_graphs import Captured
from engine.device_setup import DeviceLimits, LoadedModel
from engine.kernels import kernel_set
from engine.memory_budget import MemoryUse
from engine.model_runner import TorchRunner

MIB = 1 << 20


class CountedMemory:
    def total_bytes(self) -> int:
        return 1024 * MIB

    def free_bytes(self) -> int:
        return 1024 * MIB

    def allocated_bytes(self) -> int:
        return 7 * MIB

    def peak_bytes(self) -> int:
        return 9 * MIB

    def reset_peak(self) -> None: ...

    def context_bytes(self) -> int:
        return 100 * MIB


class CountedBackend:
    """Nothing is computed before a replay; every capture takes a MiB."""

    def __init__(self) -> None:
        self.num_captured = 0

    def capture(self, compute: object) -> Captured:
        self.num_captured += 1
        return Captured(lambda: None, torch.empty(0))

    def reserved_bytes(self) -> int:
        return self.num_captured * MIB


def loaded(limits: DeviceLimits) -> LoadedModel:
    scratch = poisoned_cache(num_blocks=4)
    return LoadedModel(tiny_model(kernel_set("triton", scratch)), scratch, limits, CountedMemory())


def test_what_a_start_measures() -> None:
    limits = DeviceLimits(max_num_batched_tokens=24, max_num_seqs=3, max_model_len=64)
    backend = CountedBackend()
    use = loaded(limits).measure(backend)
    scratch_bytes = poisoned_cache(num_blocks=4).num_bytes
    graphs_bytes = 3 * MIB  # of 1, 2 and 3 rows
    assert use == MemoryUse(100 * MIB, 7 * MIB - scratch_bytes, 2 * MIB, graphs_bytes)
    assert use.num_blocks(CountedMemory(), 0.5, MIB) == (512 * MIB - use.total_bytes) // MIB


def test_enforce_eager_captures_nothing_and_runs() -> None:
    limits = DeviceLimits(24, 3, 64, enforce_eager=True)
    backend = CountedBackend()
    model = loaded(limits)
    assert model.measure(backend).graphs_bytes == 0
    runner = model.runner(pool(), backend)
    ids = Generation([[5, 17, 99]], [GREEDY]).run(runner, 2)
    truth = TorchRunner(tiny_model(kernel_set("torch")), poisoned_cache())
    assert ids == Generation([[5, 17, 99]], [GREEDY]).run(truth, 2)
    assert backend.num_captured == 0


def pool() -> Tensor:
    storage = poisoned_cache().storage
    assert storage.shape[1] == CONFIG.num_layers
    return storage
