"""The committed table of tile sizes, warps and pipeline stages. Nothing is searched at start.

Chosen so that, for sm_80 and sm_90, nothing spills and shared memory fits (tests/kernels compiles
every entry); never timed on a GPU.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

DECODE_MAX_SPLITS = 32
MAX_HEAD_SIZE = 256


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    """``block_m``: query rows (token x head of the group) a tile; ``block_n``: keys a tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By bytes of a head, padded to a power of two: fp16 64 is 128, fp32 256 is 1,024.
_DECODE_16_BIT = {
    128: AttentionTuning(16, 128, 4, 3),
    256: AttentionTuning(16, 64, 4, 3),
    512: AttentionTuning(16, 32, 4, 3),
}
# fp32 products run without tensor cores, and need more registers: small tiles.
_DECODE_32_BIT = {
    256: AttentionTuning(16, 64, 4, 3),
    512: AttentionTuning(16, 16, 4, 3),
    1024: AttentionTuning(16, 16, 4, 2),
}
_PREFILL_16_BIT = {
    128: AttentionTuning(128, 64, 4, 3),
    256: AttentionTuning(128, 64, 8, 3),
    512: AttentionTuning(64, 32, 8, 2),
}
# Before Hopper, whose products leave more registers, fewer keys a tile.
_PREFILL_16_BIT_KEYS_BEFORE_90 = {128: 32, 256: 32}
_PREFILL_32_BIT = {
    256: AttentionTuning(16, 32, 4, 2),
    512: AttentionTuning(16, 16, 4, 2),
    1024: AttentionTuning(16, 16, 4, 2),
}


def decode_tuning(head_size: int, element_bytes: int) -> AttentionTuning:
    table = _DECODE_32_BIT if element_bytes == 4 else _DECODE_16_BIT
    return table[_row_bytes(head_size, element_bytes)]


def prefill_tuning(head_size: int, element_bytes: int, device: torch.device) -> AttentionTuning:
    """``block_m`` is the same on every device."""
    size = _row_bytes(head_size, element_bytes)
    if element_bytes == 4:
        return _PREFILL_32_BIT[size]
    tuning = _PREFILL_16_BIT[size]
    if capability(device) < 90 and size in _PREFILL_16_BIT_KEYS_BEFORE_90:
        return replace(tuning, block_n=_PREFILL_16_BIT_KEYS_BEFORE_90[size])
    return tuning


@cache
def capability(device: torch.device) -> int:
    """80 for 8.0. The interpreter takes the newest entries."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _row_bytes(head_size: int, element_bytes: int) -> int:
    padded = 1 << (head_size - 1).bit_length()
    # Heads smaller than the smallest entry take its tiles.
    return max(padded, 64) * element_bytes


def padded_head(head_size: int) -> int:
    """The power of two that a tile is wide; tensor cores take 16 at least."""
    return max(16, 1 << (head_size - 1).bit_length())


def options(num_warps: int, num_stages: int = 3) -> dict[str, int | bool]:
    """Launch options. Fusion is asked for by name: its default changes with Triton 3.10."""
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
