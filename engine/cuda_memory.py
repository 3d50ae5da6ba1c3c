"""`DeviceMemory` of a real GPU."""

import logging
import os
import subprocess

import torch

log = logging.getLogger(__name__)

# Where the driver does not tell (a container with its own process ids): more than contexts take.
_CONTEXT_ALLOWANCE = 1 << 30


class CudaMemory:
    """See `engine.memory_budget.DeviceMemory`. Device memory that torch's allocator keeps beyond
    its tensors counts as context: nobody else can have it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def context_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        used = _used_by_this_process()
        if used is None:
            log.warning(
                "the driver does not tell what this process uses; assuming a context of %d MiB",
                _CONTEXT_ALLOWANCE >> 20,
            )
            return _CONTEXT_ALLOWANCE
        return max(0, used - torch.cuda.memory_reserved(self._device))


def _used_by_this_process() -> int | None:
    """As the driver counts, tensors included."""
    command = [
        "nvidia-smi",
        "--query-compute-apps=pid,used_memory",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    for line in done.stdout.splitlines():
        pid, _, used_mib = line.partition(",")
        if pid.strip() == str(os.getpid()) and used_mib.strip().isdigit():
            return int(used_mib) << 20
    return None
