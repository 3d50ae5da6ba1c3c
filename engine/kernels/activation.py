"""SiLU(gate) x up, the gate of a Llama MLP, in one pass over what the merged product gave."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.tuning import options

_BLOCK = 1024


def silu_multiply(gate_up: Tensor) -> Tensor:
    """``[n, 2 * size]`` to ``[n, size]``; rows may be strided."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows > 0:
        grid = (num_rows, triton.cdiv(size, _BLOCK))
        _silu_multiply[grid](gate_up, output, gate_up.stride(0), size, BLOCK=_BLOCK, **options(4))
    return output


@triton.jit
def _silu_multiply(gate_up, output, stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = columns < size
    gate = tl.load(gate_up + row * stride + columns, mask=used, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + columns, mask=used, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * size + columns, gated.to(output.dtype.element_ty), mask=used)
