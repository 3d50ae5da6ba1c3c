"""Copies whole blocks between pools by lists of ids, all in one launch: gather, scatter, or both.

A block is one contiguous region (a multiple of 256 bytes), so its dtype does not matter: it is
copied as 32-bit words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.tuning import options

_WORDS = 4096


def copy_blocks(source: Tensor, source_ids: Tensor, target: Tensor, target_ids: Tensor) -> None:
    """Block ``source_ids[i]`` to ``target_ids[i]``; see `engine.kernels.Kernels.copy_blocks`."""
    num_blocks = source_ids.shape[0]
    if num_blocks == 0:
        return
    source_words, target_words = _words(source), _words(target)
    assert source_words.shape[1] == target_words.shape[1]
    size = source_words.shape[1]
    _copy_blocks[(num_blocks, triton.cdiv(size, _WORDS))](
        source_words, source_ids, target_words, target_ids,
        source_words.stride(0), target_words.stride(0), size, BLOCK=_WORDS, **options(4),
    )  # fmt: skip


def _words(pool: Tensor) -> Tensor:
    """``[num_blocks, 32-bit words a block]``, a view."""
    return pool.flatten(1).view(torch.int32)


@triton.jit
def _copy_blocks(
    source, source_ids, target, target_ids, source_stride, target_stride, size, BLOCK: tl.constexpr
):
    index = tl.program_id(0)
    source_block = tl.load(source_ids + index).to(tl.int64)
    target_block = tl.load(target_ids + index).to(tl.int64)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = words < size
    copied = tl.load(source + source_block * source_stride + words, mask=there)
    tl.store(target + target_block * target_stride + words, copied, mask=there)
