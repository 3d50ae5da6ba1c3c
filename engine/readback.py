"""A small tensor on its way from the device to the host: the one thing that a step waits for."""

import torch
from torch import Tensor


class Readback:
    """Started without waiting, after what is queued on the present stream."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tensor

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Without waiting: the host may go on writing elsewhere, not into ``host``."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
