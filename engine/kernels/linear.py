"""Matrix products on the way through a layer, chosen by the number of rows.

MKL repacks the weight of ``F.linear`` on each call, which a few rows do not pay for: from 2 to 32
of them the same product from the other side, ``(w @ x.T).T``, takes 0.3 to 1 times as long, its
transposed copy included (AVX2, 1 and 2 threads). One row and many rows are ``F.linear``'s.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ROWS = range(2, 33)
# Rows of a 16-bit head that are widened at once.
_HEAD_SLICE = 8192


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[n, in]`` times ``[out, in]`` transposed, plus ``[out]``: ``[n, out]``, contiguous."""
    if x.device.type == "cpu" and x.shape[0] in _FEW_ROWS:
        y = torch.mm(weight, x.t()).t().contiguous()
        return y if bias is None else y.add_(bias)
    return F.linear(x, weight, bias)


def head(x: Tensor, weight: Tensor) -> Tensor:
    """Logits ``[n, vocab]``, in fp32 whatever the dtype of the model."""
    if weight.dtype == torch.float32:
        return linear(x, weight)
    if weight.device.type == "cuda":
        return torch.mm(x, weight.t(), out_dtype=torch.float32)  # reads the weight as it is
    x = x.float()
    return torch.cat([linear(x, part.float()) for part in torch.split(weight, _HEAD_SLICE)], dim=1)
