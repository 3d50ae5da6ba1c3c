"""The kernel that copies all blocks of a claim, in Triton's interpreter."""

from importlib import import_module
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Interpreted or not is decided where a kernel is defined."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return import_module("kv_transfer.cuda.copy_kernel")


@pytest.mark.parametrize("block_bytes", [256, 16384, 16384 + 256])
def test_every_block_lands_where_it_should(kernel: ModuleType, block_bytes: int) -> None:
    """Less than a part of a block, one exactly, one and a bit."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(0, 256, (8, block_bytes), dtype=torch.uint8, generator=generator)
    target = torch.full((6, block_bytes), 0xA5, dtype=torch.uint8)
    source_ids, target_ids = torch.tensor([7, 0, 3]), torch.tensor([1, 5, 2])
    kernel.copy_blocks(source, target, source_ids, target_ids)
    assert (target[target_ids] == source[source_ids]).all()
    assert (target[[0, 3, 4]] == 0xA5).all()


def test_no_block_is_no_launch(kernel: ModuleType) -> None:
    none = torch.empty(0, dtype=torch.int64)
    rows = torch.zeros(2, 256, dtype=torch.uint8)
    kernel.copy_blocks(rows, rows, none, none)


def test_offsets_beyond_4_gib(kernel: ModuleType) -> None:
    """A pool is larger than 32 bits count; memory is only taken where it is touched."""
    block_bytes = 1 << 20
    rows = torch.empty((5 << 30) // block_bytes, block_bytes, dtype=torch.uint8)
    last = len(rows) - 1
    rows[last] = 7
    kernel.copy_blocks(rows, rows, torch.tensor([last]), torch.tensor([last - 1]))
    assert (rows[last - 1] == 7).all()
