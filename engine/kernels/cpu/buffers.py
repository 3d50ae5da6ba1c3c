"""Memory of compiled steps, kept from step to step; it grows with the largest step so far."""

import torch
from torch import Tensor

from engine.kernels.cpu.tiles import PANEL

# Floats between the rooms of two threads, so that they share no cache line.
_GAP = 64


class Buffers:
    """Matrices by name, and a room for each of ``num_threads`` threads. Zeros at first."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._flat: dict[str, Tensor] = {}
        self._shaped: dict[str, Tensor] = {}

    def matrix(self, name: str, num_rows: int, width: int) -> Tensor:
        """fp32 ``[num_rows, width]``; what it held before may be gone."""
        shaped = self._shaped.get(name)
        if shaped is not None and shaped.shape == (num_rows, width):
            return shaped
        size = num_rows * width
        flat = self._flat.get(name)
        if flat is None or len(flat) < size:
            # Freed first: the two together might not fit.
            self._flat.pop(name, None)
            self._shaped.pop(name, None)
            self._flat[name] = flat = torch.zeros(size, dtype=torch.float32)
        self._shaped[name] = shaped = flat[:size].view(num_rows, width)
        return shaped

    def work(self, num_floats: int) -> tuple[int, int]:
        """Address of the first thread's room, and bytes from one thread's to the next's."""
        # Contexts grow by a token a step; their rooms by halves.
        stride = (1 << (num_floats + _GAP - 1).bit_length()) if num_floats else _GAP
        return self.matrix("work", self._num_threads, stride).data_ptr(), 4 * stride


def padded(width: int) -> int:
    """Columns up to a whole panel."""
    return -(-width // PANEL) * PANEL
