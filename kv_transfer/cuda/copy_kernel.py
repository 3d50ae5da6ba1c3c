"""All blocks of a claim in one launch: a grid over blocks, and parts of a block."""

import torch
import triton
import triton.language as tl

# Words of 8 bytes that one program copies: 16 KiB, so that a handful of blocks fills a GPU too.
_PART_WORDS = 2048


@triton.jit
def _copy_kernel(source, target, source_ids, target_ids, block_words, PART_WORDS: tl.constexpr):
    """Program (i, j) copies part j of block ``source_ids[i]`` to block ``target_ids[i]``."""
    block = tl.program_id(0)
    start = tl.program_id(1) * PART_WORDS
    offsets = start + tl.arange(0, PART_WORDS)
    inside = offsets < block_words
    from_block = tl.load(source_ids + block).to(tl.int64) * block_words
    to_block = tl.load(target_ids + block).to(tl.int64) * block_words
    words = tl.load(source + from_block + offsets, mask=inside)
    tl.store(target + to_block + offsets, words, mask=inside)


def copy_blocks(
    source: torch.Tensor, target: torch.Tensor, source_ids: torch.Tensor, target_ids: torch.Tensor
) -> None:
    """Rows uint8 ``[num_blocks, block_bytes]``, block_bytes a multiple of 8; ids int64 ``[n]``."""
    if not len(source_ids):
        return
    block_words = source.shape[1] // 8
    grid = (len(source_ids), triton.cdiv(block_words, _PART_WORDS))
    _copy_kernel[grid](
        source.view(torch.int64),
        target.view(torch.int64),
        source_ids,
        target_ids,
        block_words,
        PART_WORDS=_PART_WORDS,
    )
