"""Phases of a layer that are no products: norms, rotation, attention; items are shared."""

import numpy as np
from numba import njit

from engine.kernels.cpu.attention import (
    CHUNK,
    CHUNK_TOKENS,
    FIRST,
    NUM_NEW,
    START,
    TABLE,
    attend_chunk,
    attend_token,
    copy_panel,
)
from engine.kernels.cpu.products import load_row
from engine.kernels.cpu.simd import add_scaled, dot, load_f32, scaled_product, store_f32, zero
from engine.kernels.cpu.step import K_NORM, Q_NORM
from engine.kernels.cpu.sync import done, take, wait
from engine.kernels.cpu.tiles import PANEL

# Rows of an item where a row is little work.
_NORMED_ROWS, _ROTATED_ROWS = 8, 4


@njit(nogil=True, cache=True)
def embed(weights, step, phase):
    num_tokens = len(step.token_ids)
    token = take(step.words, phase)
    while token < num_tokens:
        row = step.hidden + 4 * token * step.hidden_stride
        load_row(weights.embedding, step.token_ids[token], row)
        done(step.words, phase)
        token = take(step.words, phase)
    wait(step.words, phase, num_tokens)


@njit(nogil=True, cache=True)
def norm_rows(weights, step, norm, phase):
    num_tokens = len(step.token_ids)
    num_items = (num_tokens + _NORMED_ROWS - 1) // _NORMED_ROWS
    item = take(step.words, phase)
    while item < num_items:
        first = item * _NORMED_ROWS
        for token in range(first, min(first + _NORMED_ROWS, num_tokens)):
            offset = 4 * token * step.hidden_stride
            row, out = step.hidden + offset, step.normed + offset
            norm_row(row, norm, weights.eps, out, weights.hidden_size)
        done(step.words, phase)
        item = take(step.words, phase)
    wait(step.words, phase, num_items)


@njit(nogil=True, cache=True)
def rotate_rows(pool, layer, norms, eps, step, phase):
    num_tokens = len(step.token_ids)
    num_items = (num_tokens + _ROTATED_ROWS - 1) // _ROTATED_ROWS
    item = take(step.words, phase)
    while item < num_items:
        first = item * _ROTATED_ROWS
        for token in range(first, min(first + _ROTATED_ROWS, num_tokens)):
            rotate_and_write(pool, layer, norms, eps, step, token)
        done(step.words, phase)
        item = take(step.words, phase)
    wait(step.words, phase, num_items)


@njit(nogil=True, cache=True)
def norm_row(x, norm, eps, out, size):
    """Root mean square norm (Zhang, Sennrich 2019, arXiv 1910.07467)."""
    factor = np.float32(1.0) / np.sqrt(dot(x, x, size) / np.float32(size) + np.float32(eps))
    scaled_product(factor, x, norm, out, size)


@njit(nogil=True, cache=True)
def rotate_and_write(pool, layer, norms, eps, step, token):
    """Norms and rotates one token's heads in place (queries also get the 1/sqrt(head size) of
    their scores), and puts keys and values into their slot."""
    size, half = pool.head_size, pool.head_size // 2
    row = step.queries + 4 * token * step.queries_stride
    scale = np.float32(1.0) / np.sqrt(np.float32(size))
    for head in range(pool.num_heads + pool.num_kv_heads):
        at = row + 4 * head * size
        is_query = head < pool.num_heads
        norm = norms[Q_NORM] if is_query else norms[K_NORM]
        if norm != 0:
            norm_row(at, norm, eps, at, size)
        factor = scale if is_query else np.float32(1.0)
        for i in range(half):
            cosine, sine = step.cosines[token, i] * factor, step.sines[token, i] * factor
            a, b = load_f32(at + 4 * i), load_f32(at + 4 * (half + i))
            store_f32(a * cosine - b * sine, at + 4 * i)
            store_f32(b * cosine + a * sine, at + 4 * (half + i))
    span = step.spans[span_of(step.spans, token)]
    position = span[START] + token - span[FIRST]
    block = step.tables[span[TABLE] + position // pool.block_size]
    width = pool.num_kv_heads * size
    row_of = (block * pool.num_layers + layer) * 2 * pool.block_size + position % pool.block_size
    key = pool.address + 4 * row_of * width
    keys = row + 4 * pool.num_heads * size
    for kind in range(2):
        to = key + 4 * kind * pool.block_size * width
        zero(to, width)
        add_scaled(np.float32(1.0), keys + 4 * kind * width, to, width)


@njit(nogil=True, cache=True)
def span_of(spans, token):
    """Index of the span that a token belongs to, by halving."""
    low, high = 0, len(spans) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if spans[middle, FIRST] <= token:
            low = middle
        else:
            high = middle - 1
    return low


@njit(nogil=True, cache=True)
def copy_chunks(pool, layer, step, phase):
    item = take(step.words, phase)
    base = 0
    for index in range(len(step.spans)):
        span = step.spans[index]
        if span[NUM_NEW] < CHUNK:
            continue
        panels = (span[START] + span[NUM_NEW] + PANEL - 1) // PANEL
        while item < base + panels:
            copy_panel(pool, layer, span, step.tables, item - base, step.copies)
            done(step.words, phase)
            item = take(step.words, phase)
        base += panels
    wait(step.words, phase, base)


@njit(nogil=True, cache=True)
def attend_spans(pool, layer, step, phase, num_threads, work):
    """Where tokens are few, their heads are items of their own."""
    rep = pool.num_heads // pool.num_kv_heads
    enough, num_tokens = 4 * num_threads, len(step.token_ids)
    num_kv, num_queries = pool.num_kv_heads, rep
    if num_tokens < enough:
        num_kv = 1
        if num_tokens * pool.num_kv_heads < enough:
            num_queries = 1
    parts = pool.num_heads // (num_kv * num_queries)
    item = take(step.words, phase)
    base = 0
    for index in range(len(step.spans)):
        span = step.spans[index]
        if span[NUM_NEW] >= CHUNK:
            num_blocks = (span[NUM_NEW] + CHUNK_TOKENS - 1) // CHUNK_TOKENS
            num_items = num_blocks * pool.num_kv_heads
        else:
            num_items = span[NUM_NEW] * parts
        while item < base + num_items:
            # The longest contexts first: what is left at the end is short.
            mine = num_items - 1 - (item - base)
            if span[NUM_NEW] >= CHUNK:
                attend_part_of_chunk(pool, step, span, mine, work)
            else:
                head = mine % parts * num_kv * num_queries
                queries, out = heads_at(pool, step, span, mine // parts, head)
                attend_token(
                    pool, layer, span, step.tables, mine // parts, head // rep, num_kv,
                    num_queries, queries, out, work,
                )  # fmt: skip
            done(step.words, phase)
            item = take(step.words, phase)
        base += num_items
    wait(step.words, phase, base)


@njit(nogil=True, cache=True)
def attend_part_of_chunk(pool, step, span, item, work):
    kv_head, token = item % pool.num_kv_heads, item // pool.num_kv_heads * CHUNK_TOKENS
    head = kv_head * (pool.num_heads // pool.num_kv_heads)
    queries, out = heads_at(pool, step, span, token, head)
    attend_chunk(
        pool, span, token, kv_head, queries, step.queries_stride, out, step.attended_stride,
        step.copies, work,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def heads_at(pool, step, span, token, head):
    """Addresses of a token's queries from ``head`` on, and of what they give."""
    row, offset = span[FIRST] + token, head * pool.head_size
    queries = step.queries + 4 * (row * step.queries_stride + offset)
    return queries, step.attended + 4 * (row * step.attended_stride + offset)
