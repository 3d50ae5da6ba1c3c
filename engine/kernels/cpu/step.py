"""What a compiled step is given: the pool, the weights, the step's own tokens and buffers."""

from typing import NamedTuple

import numpy as np

# Products of a layer, and its norms: rows of the tables below.
QKV, OUTPUT, GATE_UP, DOWN = range(4)
INPUT_NORM, POST_NORM, Q_NORM, K_NORM = range(4)
# Phases of a layer; the embedding's and the last norm's come after those of all layers.
NUM_PHASES = 9


class Pool(NamedTuple):
    """The KV pool ``[blocks, layers, 2, block_size, kv heads, head_size]``, and the heads."""

    address: int
    num_layers: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int


class Weights(NamedTuple):
    """``products`` ``[layers, 4, 7]`` (products.py), ``norms`` ``[layers, 4]`` addresses, 0 where
    there is none; the embedding as a product."""

    products: np.ndarray
    norms: np.ndarray
    final_norm: int
    embedding: np.ndarray
    hidden_size: int
    eps: float


class Step(NamedTuple):
    """The step's tokens and where its buffers lie, by address; strides count floats.

    ``spans`` ``[rows, 5]`` (attention.py) and ``tables``, all block tables one after the other;
    ``cosines`` and ``sines`` ``[n, head_size / 2]``; ``queries`` one row a token: q, k and v."""

    token_ids: np.ndarray
    spans: np.ndarray
    tables: np.ndarray
    cosines: np.ndarray
    sines: np.ndarray
    hidden: int
    hidden_stride: int
    normed: int
    queries: int
    queries_stride: int
    attended: int
    attended_stride: int
    inner: int
    inner_stride: int
    copies: int
    has_chunks: bool
    work: int
    work_bytes: int
    words: int
