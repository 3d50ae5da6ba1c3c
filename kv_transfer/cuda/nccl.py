"""One end of a two-rank NCCL group.

NCCL ends nothing by itself that a dead peer left undone, and torch's watchdog would end the whole
process. So operations are watched from here: once one takes too long the communicator is aborted
(never destroyed, which would wait for the peer), and the next transfer makes another.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from kv_transfer.dist.bell import STALL_S
from kv_transfer.dist.group import c10d

_POLL_S = 50e-6
# Read by torch when a group is made: no watchdog that ends processes, no dump at a timeout, and a
# communicator that is not waited for longer than a peer may be silent.
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(int(STALL_S)),
}


class NcclGroup:
    """A `kv_transfer.dist.group.PairGroup`; all rows of a call are one launch."""

    rows_at_once = 1 << 30

    def __init__(self, store: Any, rank: int, device: torch.device) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if not c10d.is_nccl_available():
            raise RuntimeError("this build of torch has no NCCL")
        nccl = c10d.ProcessGroupNCCL
        self._group = nccl(store, rank, 2, nccl.Options())
        self._peer = 1 - rank
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._aborted = False

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        self._run(self._group.send, rows)

    def receive(self, rows: Sequence[torch.Tensor]) -> None:
        self._run(self._group.recv, rows)

    def abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            self._group.abort()

    def _run(self, operation: Any, rows: Sequence[torch.Tensor]) -> None:
        if self._aborted:
            raise RuntimeError("the group was aborted")
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._group._start_coalescing()
            for row in rows:
                operation([row], self._peer, 0)
            work = self._group._end_coalescing()
        deadline_s = time.monotonic() + STALL_S
        while not work.is_completed():
            if self._aborted or time.monotonic() > deadline_s:
                self.abort()
                # NCCL works on a stream of its own. Only then does nothing write to the rows.
                torch.cuda.synchronize(self._device)
                raise RuntimeError("the other end of an NCCL group is gone")
            time.sleep(_POLL_S)
