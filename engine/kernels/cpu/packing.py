"""Weights in panels of 16 outputs, in fp32, int8 or int4.

A panel holds, for each input k in turn, the weights of 16 outputs, so that one load gives a vector
of outputs and rows need no repacking::

    fp32   [panels, k, 16]
    int8   [panels, k, 16], scales [panels, k / sharing, 16]             w = q * scale
    int4   [panels, k / 8, 16] words of eight inputs, the first in the lowest bits;
           [panels, k / 32, 2, 16] scales and minima                     w = q * scale + minimum

int8 shares a scale along a whole row, or among 32 inputs where int4 stands beside it (the head of a
GGUF file is stored so). Weights that lie on a grid of 16 levels already, as those of a Q4_1 file
do, are found out and kept exactly; others go from the group's least to its greatest value.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from common.errors import ModelError
from engine.kernels.cpu import products
from engine.kernels.cpu.tiles import GROUP, PANEL

FORMATS = ("none", "int8", "int4")
# Inputs that an int8 kernel takes in a turn.
_INT8_TURN = 4
# How far from a whole level a value on a grid may lie, in levels.
_ON_GRID = 2e-3
# What panels are made of, and the kernels' name for it.
_KINDS = {"float32": products.FP32, "int8": products.INT8, "int32": products.INT4}


@dataclass(frozen=True, slots=True)
class Packed:
    """Panels, scales and a bias for whole panels. The arrays may be views of a mapped file."""

    panels: NDArray[np.generic]
    scales: NDArray[np.generic] | None
    bias: NDArray[np.generic] | None

    @property
    def entry(self) -> NDArray[np.int64]:
        """What the kernels read (products.py): addresses, so the arrays must be held."""
        kind = _KINDS[self.panels.dtype.name]
        k, sharing = self.panels.shape[1], 1
        if kind == products.INT4:
            k, sharing = 8 * k, GROUP
        elif self.scales is not None:
            sharing = k // self.scales.shape[1]
        addresses = [address_of(array) for array in (self.panels, self.scales, self.bias)]
        return np.array([*addresses, kind, k, len(self.panels), sharing], dtype=np.int64)


def address_of(array: NDArray[np.generic] | None) -> int:
    """0 for none."""
    return 0 if array is None else array.ctypes.data


def pack(weight: Tensor, bias: Tensor | None, quantization: str, is_head: bool = False) -> Packed:
    """``[out, in]`` fp32 to panels; heads and embeddings are never below int8."""
    k = weight.shape[1]
    if quantization == "none":
        return _packed(_panels(weight), None, bias)
    if quantization == "int8":
        return _pack_int8(weight, bias, k)
    if k % GROUP:
        raise ModelError("quantization", f"int4 shares scales among {GROUP} inputs, not {k}")
    if is_head:
        return _pack_int8(weight, bias, GROUP)
    levels, scales, minima = quantize_int4(_padded(weight).numpy())
    words = torch.from_numpy(_words(levels))
    grid = torch.stack((_panels(torch.from_numpy(scales)), _panels(torch.from_numpy(minima))), 2)
    return _packed(_panels(words), grid.contiguous(), bias)


def dequantized(weight: Tensor, quantization: str, is_head: bool = False) -> Tensor:
    """The fp32 weight that the packed one stands for: what it is compared with."""
    if quantization == "none":
        return weight
    if quantization == "int4" and not is_head:
        levels, scales, minima = quantize_int4(weight.numpy())
        wide = [np.repeat(part, GROUP, axis=1) for part in (scales, minima)]
        return torch.from_numpy(levels * wide[0] + wide[1])
    levels, scales = _quantize_int8(weight, GROUP if quantization == "int4" else weight.shape[1])
    return levels.float() * scales.repeat_interleave(weight.shape[1] // scales.shape[1], dim=1)


def _pack_int8(weight: Tensor, bias: Tensor | None, sharing: int) -> Packed:
    k = weight.shape[1]
    if k % _INT8_TURN:
        raise ModelError("quantization", f"int8 takes {_INT8_TURN} inputs at once, not {k}")
    levels, scales = _quantize_int8(_padded(weight), sharing)
    return _packed(_panels(levels), _panels(scales), bias)


def _quantize_int8(weight: Tensor, sharing: int) -> tuple[Tensor, Tensor]:
    """int8 ``[out, in]`` and scales ``[out, in / sharing]``."""
    groups = weight.view(len(weight), -1, sharing)
    scales = groups.abs().amax(dim=2, keepdim=True) / 127
    levels = torch.where(scales > 0, groups / scales, 0.0).round_().to(torch.int8)
    return levels.view(weight.shape), scales[:, :, 0]


@njit(nogil=True, cache=True)
def quantize_int4(weight):
    """fp32 ``[out, in]`` to levels 0..15 (uint8), and scales and minima ``[out, in / 32]``."""
    num_rows, k = weight.shape
    levels = np.zeros((num_rows, k), np.uint8)
    scales = np.zeros((num_rows, k // GROUP), np.float32)
    minima = np.zeros((num_rows, k // GROUP), np.float32)
    for row in range(num_rows):
        for group in range(k // GROUP):
            values = weight[row, group * GROUP : (group + 1) * GROUP]
            low, high = values.min(), values.max()
            minima[row, group] = low
            if high == low:
                continue
            scale = (high - low) / np.float32(15)
            for steps in range(1, 15):
                candidate = (high - low) / np.float32(steps)
                on_grid = True
                for value in values:
                    level = (value - low) / candidate
                    if abs(level - np.rint(level)) > _ON_GRID:
                        on_grid = False
                        break
                if on_grid:
                    scale = candidate
                    break
            scales[row, group] = scale
            for i in range(GROUP):
                levels[row, group * GROUP + i] = np.uint8(np.rint((values[i] - low) / scale))
    return levels, scales, minima


def _words(levels: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Eight levels a word, ``[out, in / 8]``."""
    eights = levels.reshape(len(levels), -1, 8).astype(np.uint32)
    shifted = eights << np.arange(0, 32, 4, dtype=np.uint32)
    words: NDArray[np.int32] = np.bitwise_or.reduce(shifted, axis=2).view(np.int32)
    return words


def _padded(weight: Tensor) -> Tensor:
    """With rows of zeros up to whole panels."""
    missing = -len(weight) % PANEL
    return torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight


def _panels(weight: Tensor) -> Tensor:
    """``[out, n]`` to ``[panels, n, 16]``."""
    weight = _padded(weight)
    return weight.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def _packed(panels: Tensor, scales: Tensor | None, bias: Tensor | None) -> Packed:
    wide_bias = None if bias is None else _padded(bias[:, None])[:, 0].contiguous().numpy()
    return Packed(panels.numpy(), None if scales is None else scales.numpy(), wide_bias)


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and up (weights or biases) in turns of 16: one of each makes a pair."""
    pairs = torch.stack((_blocks(gate), _blocks(up)), dim=1)
    return pairs.flatten(0, 2)


def _blocks(rows: Tensor) -> Tensor:
    assert len(rows) % PANEL == 0
    blocks: Tensor = rows.unflatten(0, (-1, PANEL))
    return blocks
