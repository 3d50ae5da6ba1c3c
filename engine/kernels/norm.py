"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), alone or fused with the residual's addition.

Sums are fp32. A program takes whole rows: one of a hidden state, many of the small ones that
Qwen3's norm by head has.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.tuning import options

_TILE = 2048


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``[n, size]`` or ``[n, num_heads, size]``; the last axis contiguous, the others strided."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, None, output, weight, eps)
    return output


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``residual + x`` ``[n, size]``, and the same normed."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, total, output, weight, eps)
    return total, output


def _launch(
    x: Tensor, residual: Tensor | None, total: Tensor | None, output: Tensor, weight: Tensor,
    eps: float,
) -> None:  # fmt: skip
    size = x.shape[-1]
    per_token = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * per_token
    if num_rows == 0:
        return
    block = triton.next_power_of_2(size)
    block_rows = max(1, _TILE // block)
    _norm[(triton.cdiv(num_rows, block_rows),)](
        x, residual, total, output, weight, eps, num_rows, per_token,
        x.stride(0), x.stride(1) if x.dim() == 3 else 0,
        0 if residual is None else residual.stride(0),
        ADDS=residual is not None, SIZE=size, BLOCK_ROWS=block_rows, BLOCK=block,
        **options(min(16, max(4, block * block_rows // 1024))),
    )  # fmt: skip


@triton.jit
def _norm(
    xs, residuals, totals, output, weights, eps, num_rows, per_token,
    x_stride_n, x_stride_h, r_stride_n,
    ADDS: tl.constexpr, SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK)
    used = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    x_at = (rows // per_token) * x_stride_n + (rows % per_token) * x_stride_h
    x = tl.load(xs + x_at[:, None] + columns[None, :], mask=used, other=0.0)
    out_at = rows[:, None] * SIZE + columns[None, :]
    if ADDS:
        residual_at = rows[:, None] * r_stride_n + columns[None, :]
        # Rounded before it is normed, as it is when kept.
        x = (x + tl.load(residuals + residual_at, mask=used, other=0.0)).to(x.dtype)
        tl.store(totals + out_at, x, mask=used)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
    weight = tl.load(weights + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    normed = x * scale[:, None] * weight[None, :]
    tl.store(output + out_at, normed.to(output.dtype.element_ty), mask=used)
