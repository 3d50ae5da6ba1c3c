"""Triton kernels in Triton's interpreter: the variable is read when a kernel is defined."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from bench.gpu import interpreter


@pytest.fixture(autouse=True)
def _storages_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.UntypedStorage, "copy_", torch.UntypedStorage.copy_)
    interpreter.leave_storages_in_place()
