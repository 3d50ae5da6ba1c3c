"""One tile of keys and values, as both paged attention kernels take it (inlined into them)."""

import triton
import triton.language as tl


@triton.jit
def load_tile(
    keys, value_offset, table, columns, there, head_at, in_head, stride_block, stride_token,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Keys and values ``[BLOCK_N, BLOCK_D]`` of the positions ``columns``, zeros where not
    ``there``: behind a context lies another sequence's past, perhaps not even a number."""
    # An id times a stride passes 2**31: int64 before it does.
    block = tl.load(table + columns // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    token_at = block * stride_block + (columns % BLOCK_SIZE) * stride_token
    address = keys + token_at[:, None] + head_at[None, :]
    loaded = there[:, None] & in_head[None, :]
    key = tl.load(address, mask=loaded, other=0.0)
    value = tl.load(address + value_offset, mask=loaded, other=0.0)
    return key, value


@triton.jit
def attend_tile(
    query, key, value, visible, scale_log2, greatest, total, accumulated, MASKED: tl.constexpr
):
    """Online softmax: takes a tile into the running maximum (of scores times log2 e), the sum of
    weights and the weighted sum of values. Each row sees something in its first tile."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_greatest = tl.maximum(greatest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_greatest[:, None])
    fade = tl.exp2(greatest - new_greatest)
    total = total * fade + tl.sum(weights, 1)
    accumulated = accumulated * fade[:, None]
    accumulated = tl.dot(weights.to(value.dtype), value, accumulated, input_precision="ieee")
    return new_greatest, total, accumulated
