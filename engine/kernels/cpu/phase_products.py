"""The products of a layer as phases: an item is some rows times some panels."""

from numba import njit

from engine.kernels.cpu.products import INPUTS, PANELS, block_rows, multiply_panel, sum_groups
from engine.kernels.cpu.simd import silu_product
from engine.kernels.cpu.sync import done, take, wait
from engine.kernels.cpu.tiles import PANEL


@njit(nogil=True, cache=True)
def chunk_of(panels, num_threads):
    """Panels that are taken at once: a few turns a thread."""
    return max(1, panels // (6 * num_threads))


@njit(nogil=True, cache=True)
def multiply(entry, x, x_stride, out, out_stride, add, num_rows, words, phase, num_threads, work):
    """``out (+)= x @ weight``; an item is some rows times some panels."""
    k, panels = entry[INPUTS], entry[PANELS]
    rows, chunk = block_rows(k, num_rows), chunk_of(panels, num_threads)
    num_chunks = (panels + chunk - 1) // chunk
    num_items = (num_rows + rows - 1) // rows * num_chunks
    sums, panel_room = work, work + 4 * k
    if num_rows == 1:
        sum_groups(entry, x, sums)
    item = take(words, phase)
    while item < num_items:
        first, panel = item // num_chunks * rows, item % num_chunks * chunk
        count = min(rows, num_rows - first)
        for index in range(panel, min(panel + chunk, panels)):
            multiply_panel(
                entry,
                index,
                x + 4 * first * x_stride,
                x_stride,
                sums,
                out + 4 * (first * out_stride + index * PANEL),
                out_stride,
                add,
                count,
                num_rows == 1,
                panel_room,
            )
        done(words, phase)
        item = take(words, phase)
    wait(words, phase, num_items)


@njit(nogil=True, cache=True)
def multiply_gated(entry, step, num_rows, phase, num_threads, work):
    """Gate and up at once: panel 2j is gate's, 2j + 1 up's, of the same 16 elements."""
    k, pairs = entry[INPUTS], entry[PANELS] // 2
    rows, chunk = block_rows(k, num_rows), chunk_of(pairs, num_threads)
    num_chunks = (pairs + chunk - 1) // chunk
    num_items = (num_rows + rows - 1) // rows * num_chunks
    sums, both, panel_room = work, work + 4 * k, work + 4 * (k + rows * 2 * PANEL)
    if num_rows == 1:
        sum_groups(entry, step.normed, sums)
    item = take(step.words, phase)
    while item < num_items:
        first, pair = item // num_chunks * rows, item % num_chunks * chunk
        count = min(rows, num_rows - first)
        x = step.normed + 4 * first * step.hidden_stride
        for index in range(pair, min(pair + chunk, pairs)):
            for half in range(2):
                multiply_panel(
                    entry,
                    2 * index + half,
                    x,
                    step.hidden_stride,
                    sums,
                    both + 4 * half * PANEL,
                    2 * PANEL,
                    0,
                    count,
                    num_rows == 1,
                    panel_room,
                )
            for row in range(count):
                gate = both + 4 * row * 2 * PANEL
                to = step.inner + 4 * ((first + row) * step.inner_stride + index * PANEL)
                silu_product(gate, gate + 4 * PANEL, to, PANEL)
        done(step.words, phase)
        item = take(step.words, phase)
    wait(step.words, phase, num_items)
