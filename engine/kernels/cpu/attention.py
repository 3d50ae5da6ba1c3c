"""Attention in place, through the block table.

Spans of few new tokens (decodes, drafts) read keys and values where they lie in the pool, block
after block in the order of the table: what a sequence gets does not depend on its mates. Spans of
many (prompts, chunks) copy the context once a layer into panels, 16 keys wide and 16 elements of
the values wide, which all their tokens multiply as if they were weights (products.py).
"""

from numba import njit

from engine.kernels.cpu.products import PANEL_STEP, multiply_rows
from engine.kernels.cpu.simd import (
    add_scaled,
    dot,
    exp_all,
    largest_of,
    load_f32,
    prefetch,
    scale_all,
    store_f32,
    zero,
)
from engine.kernels.cpu.tiles import PANEL

# New tokens of a span from which on copying pays.
CHUNK = 5
# Tokens of a chunk that are computed together.
CHUNK_TOKENS = 16
# Of a span: index of its first token, new tokens, start, where its block table begins, and where
# its panels begin in the copies (0 and unused for few tokens).
FIRST, NUM_NEW, START, TABLE, COPY = range(5)
NUM_SPAN_FIELDS = 5
_LOWEST = -3.0e38


@njit(nogil=True, cache=True)
def attend_token(pool, layer, span, tables, token, kv_head, num_kv, rep, queries, out, work):
    """One token's query heads, ``rep`` for each of ``num_kv`` KV heads from ``kv_head`` on:
    ``queries`` and ``out`` are addresses of those heads, one after the other; ``work`` takes a row
    of scores a head. Blocks lie far from each other, so the next one is asked for early."""
    context = span[START] + token + 1
    stride = (context + 7) // 8 * 8
    size, block_size = pool.head_size, pool.block_size
    token_bytes, row_bytes = pool.num_kv_heads * size * 4, num_kv * size * 4
    keys_at = pool.address + layer * 2 * block_size * token_bytes + kv_head * size * 4
    values_at = keys_at + block_size * token_bytes
    block_bytes = pool.num_layers * 2 * block_size * token_bytes
    num_blocks = (context + block_size - 1) // block_size
    first_values = values_at + tables[span[TABLE]] * block_bytes
    for index in range(num_blocks):
        keys = keys_at + tables[span[TABLE] + index] * block_bytes
        following = first_values
        if index + 1 < num_blocks:
            following = keys_at + tables[span[TABLE] + index + 1] * block_bytes
        first = index * block_size
        for position in range(first, min(first + block_size, context)):
            offset = (position - first) * token_bytes
            prefetch(following + offset, row_bytes)
            for kv in range(num_kv):
                key = keys + offset + kv * size * 4
                for head in range(kv * rep, (kv + 1) * rep):
                    score = dot(queries + 4 * size * head, key, size)
                    store_f32(score, work + 4 * (head * stride + position))
    for head in range(num_kv * rep):
        softmax(work + 4 * head * stride, context, stride)
    for index in range(num_blocks):
        values = values_at + tables[span[TABLE] + index] * block_bytes
        first = index * block_size
        count = min(block_size, context - first)
        if index + 1 < num_blocks:
            following = values_at + tables[span[TABLE] + index + 1] * block_bytes
            for offset in range(0, block_size * token_bytes, token_bytes):
                prefetch(following + offset, row_bytes)
        for kv in range(num_kv):
            for part in range(0, size, PANEL):
                multiply_rows(
                    work + 4 * (kv * rep * stride + first), stride,
                    values + 4 * (kv * size + part), token_bytes, count,
                    out + 4 * (kv * rep * size + part), size, int(index > 0), rep,
                )  # fmt: skip


@njit(nogil=True, cache=True)
def softmax(scores, count, padded):
    """Of the first ``count``; the others, up to a multiple of 8, become 0."""
    for i in range(count, padded):
        store_f32(_LOWEST, scores + 4 * i)
    total = exp_all(scores, padded, largest_of(scores, padded))
    scale_all(1.0 / total, scores, padded)
    for i in range(count, padded):
        store_f32(0.0, scores + 4 * i)


@njit(nogil=True, cache=True)
def copy_panel(pool, layer, span, tables, index, copies):
    """Keys and values of 16 positions, those behind the context as 0.

    Of each KV head, keys ``[panels, head_size, 16]``, then values ``[head_size / 16, c, 16]``."""
    size, block_size = pool.head_size, pool.block_size
    context = span[START] + span[NUM_NEW]
    padded = (context + PANEL - 1) // PANEL * PANEL
    token_bytes = pool.num_kv_heads * size * 4
    layer_at = pool.address + layer * 2 * block_size * token_bytes
    block_bytes = pool.num_layers * 2 * block_size * token_bytes
    for lane in range(PANEL):
        position = index * PANEL + lane
        key = 0
        if position < context:
            block = tables[span[TABLE] + position // block_size]
            key = layer_at + block * block_bytes + position % block_size * token_bytes
        for kv_head in range(pool.num_kv_heads):
            head_at = copies + 4 * (span[COPY] + kv_head * 2 * padded * size)
            to_key = head_at + 4 * (index * size * PANEL + lane)
            to_value = head_at + 4 * (padded * size + position * PANEL)
            at = key + 4 * kv_head * size
            value_at = at + block_size * token_bytes
            for i in range(size):
                k, v = 0.0, 0.0
                if key != 0:
                    k, v = load_f32(at + 4 * i), load_f32(value_at + 4 * i)
                store_f32(k, to_key + 4 * i * PANEL)
                store_f32(v, to_value + 4 * (i // PANEL * padded * PANEL + i % PANEL))


@njit(nogil=True, cache=True)
def attend_chunk(pool, span, first, kv_head, queries, q_stride, out, out_stride, copies, work):
    """Up to 16 of a span's tokens from its ``first`` on, all query heads of one KV head.
    ``queries`` and ``out`` are addresses of token ``first``'s first such head."""
    size = pool.head_size
    rep = pool.num_heads // pool.num_kv_heads
    context = span[START] + span[NUM_NEW]
    padded = (context + PANEL - 1) // PANEL * PANEL
    num_tokens = min(CHUNK_TOKENS, span[NUM_NEW] - first)
    num_rows = num_tokens * rep
    seen = span[START] + first + num_tokens
    panels = (seen + PANEL - 1) // PANEL
    keys = copies + 4 * (span[COPY] + kv_head * 2 * padded * size)
    values = keys + 4 * padded * size
    rows = work
    scores = work + 4 * num_rows * size
    stride = panels * PANEL
    for row in range(num_rows):
        source = queries + 4 * (row // rep * q_stride + row % rep * size)
        zero(rows + 4 * row * size, size)
        add_scaled(1.0, source, rows + 4 * row * size, size)
    for panel in range(panels):
        key = keys + 4 * panel * size * PANEL
        multiply_rows(
            rows, size, key, PANEL_STEP, size, scores + 4 * panel * PANEL, stride, 0, num_rows
        )
    for row in range(num_rows):
        softmax(scores + 4 * row * stride, span[START] + first + row // rep + 1, stride)
    for part in range(size // PANEL):
        value = values + 4 * part * padded * PANEL
        multiply_rows(
            scores, stride, value, PANEL_STEP, seen, rows + 4 * part * PANEL, size, 0, num_rows
        )
    for row in range(num_rows):
        to = out + 4 * (row // rep * out_stride + row % rep * size)
        zero(to, size)
        add_scaled(1.0, rows + 4 * row * size, to, size)
