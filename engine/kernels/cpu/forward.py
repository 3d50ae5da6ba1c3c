"""One pass of a decoder of the Llama family, as one compiled function that every thread runs.

The life of a layer; each line is a phase, whose items the threads share out (sync.py):

1. rows are normed;
2. times q, k, v;
3. q and k are normed where the model does so, and rotated; keys and values go into the pool;
4. contexts of chunks are copied to panels (attention.py), if there are chunks;
5. attention, an item a token and KV head, or 16 tokens of a chunk and KV head;
6. times the output weight, on top of the hidden states;
7. rows are normed;
8. times gate and up, whose panels lie in turns, and silu(gate) * up of what came out;
9. times down, on top of the hidden states.
"""

from numba import njit

from engine.kernels.cpu.phase_products import multiply, multiply_gated
from engine.kernels.cpu.phases import (
    attend_spans,
    copy_chunks,
    embed,
    norm_rows,
    rotate_rows,
)
from engine.kernels.cpu.step import (
    DOWN,
    GATE_UP,
    INPUT_NORM,
    NUM_PHASES,
    OUTPUT,
    POST_NORM,
    QKV,
)


@njit(nogil=True, cache=True)
def forward(thread, num_threads, pool, weights, step):
    """Normed hidden states of all tokens, in ``step.normed``."""
    words = step.words
    work = step.work + thread * step.work_bytes
    num_tokens = len(step.token_ids)
    last = len(weights.products) * NUM_PHASES
    embed(weights, step, last)
    for layer in range(len(weights.products)):
        products, norms = weights.products[layer], weights.norms[layer]
        phase = layer * NUM_PHASES
        norm_rows(weights, step, norms[INPUT_NORM], phase)
        multiply(
            products[QKV], step.normed, step.hidden_stride, step.queries, step.queries_stride,
            0, num_tokens, words, phase + 1, num_threads, work,
        )  # fmt: skip
        rotate_rows(pool, layer, norms, weights.eps, step, phase + 2)
        if step.has_chunks:
            copy_chunks(pool, layer, step, phase + 3)
        attend_spans(pool, layer, step, phase + 4, num_threads, work)
        multiply(
            products[OUTPUT], step.attended, step.attended_stride, step.hidden, step.hidden_stride,
            1, num_tokens, words, phase + 5, num_threads, work,
        )  # fmt: skip
        norm_rows(weights, step, norms[POST_NORM], phase + 6)
        multiply_gated(products[GATE_UP], step, num_tokens, phase + 7, num_threads, work)
        multiply(
            products[DOWN], step.inner, step.inner_stride, step.hidden, step.hidden_stride,
            1, num_tokens, words, phase + 8, num_threads, work,
        )  # fmt: skip
    norm_rows(weights, step, weights.final_norm, last + 1)


@njit(nogil=True, cache=True)
def head_rows(
    thread, num_threads, entry, x, x_stride, num_rows, out, out_stride, words, work, size
):
    """Logits of ``num_rows`` rows."""
    multiply(
        entry,
        x,
        x_stride,
        out,
        out_stride,
        0,
        num_rows,
        words,
        0,
        num_threads,
        work + thread * size,
    )
