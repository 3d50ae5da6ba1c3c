"""How many KV blocks a worker may have on a GPU that it may share with others.

A worker owns ``gpu_memory_utilization`` of the *whole* device. Out of that share come, each counted
as this process' own, so that what others hold, now or later, changes nothing::

    share of the device =  context   CUDA's own, and libraries'
                         + weights
                         + step      what the largest step takes at its peak
                         + graphs    what captured decodes keep
                         + KV pool   the rest, in whole blocks

The life of a budget: load the weights; measure (`measure`: the largest step and the captures, over
a small scratch pool); divide (`MemoryUse.num_blocks`); only then is the pool allocated.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from common.errors import ConfigError

# What the smallest sequence needs, a block for its prompt and one to grow into; and the null block.
MIN_BLOCKS = 3


class DeviceMemory(Protocol):
    """A GPU's memory as this process sees it; all in bytes."""

    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int:
        """Of the device, whoever took the rest."""
        ...

    def allocated_bytes(self) -> int:
        """By this process' tensors."""
        ...

    def peak_bytes(self) -> int:
        """The most that was allocated since ``reset_peak``."""
        ...

    def reset_peak(self) -> None: ...

    def context_bytes(self) -> int:
        """This process' memory that is no tensor: context, kernels, libraries."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Of one worker, without its pool."""

    context_bytes: int
    weights_bytes: int
    step_bytes: int
    graphs_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(asdict(self).values())

    def num_blocks(self, memory: DeviceMemory, utilization: float, block_bytes: int) -> int:
        """Blocks of the pool, the null block among them. Raises ConfigError, with the arithmetic,
        where there are too few or others hold too much."""
        share = int(utilization * memory.total_bytes())
        num_blocks = (share - self.total_bytes) // block_bytes
        parts = ", ".join(
            f"{name.removesuffix('_bytes')} {_mib(value)}" for name, value in asdict(self).items()
        )
        if num_blocks < MIN_BLOCKS:
            raise ConfigError(
                "gpu_memory_utilization",
                f"{utilization} of {_mib(memory.total_bytes())} is {_mib(share)}; {parts} leave no "
                f"room for {MIN_BLOCKS} blocks of {block_bytes} bytes",
            )
        if (pool := num_blocks * block_bytes) > (free := memory.free_bytes()):
            raise ConfigError(
                "gpu_memory_utilization",
                f"{utilization} of {_mib(memory.total_bytes())} leaves {_mib(pool)} for KV beside "
                f"{parts}, but {_mib(free)} are free on the device: its workers' shares must not "
                "add up to more than 1",
            )
        return num_blocks


def measure(
    memory: DeviceMemory,
    scratch_bytes: int,
    step: Callable[[], None],
    capture: Callable[[], int],
) -> MemoryUse:
    """With the weights and a scratch pool of ``scratch_bytes`` allocated. ``step`` computes the
    largest step; ``capture`` captures the decode graphs and gives the memory they keep."""
    held = memory.allocated_bytes()
    memory.reset_peak()
    step()
    step_bytes = memory.peak_bytes() - held
    graphs_bytes = capture()
    return MemoryUse(memory.context_bytes(), held - scratch_bytes, step_bytes, graphs_bytes)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
