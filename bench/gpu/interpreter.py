"""Triton's interpreter on large pools."""

import torch

_COPY = torch.UntypedStorage.copy_


def _copy_unless_same(
    self: torch.UntypedStorage, source: torch.UntypedStorage, *args: object
) -> torch.UntypedStorage:
    return self if self.data_ptr() == source.data_ptr() else _COPY(self, source, *args)


def leave_storages_in_place() -> None:
    """After each launch the interpreter copies every argument's storage back, on a CPU onto
    itself, which touches every page of a pool that is meant not to be there."""
    torch.UntypedStorage.copy_ = _copy_unless_same
