"""Rows times a packed weight: the same for one row and for thousands, for fp32, int8 and int4.

A weight is an entry of seven int64: addresses of its panels, of their scales and of its bias (0:
none), its format, its inputs k, its panels, and the inputs that share a scale.
"""

from numba import njit

from engine.kernels.cpu.simd import add_to, load_f32, load_i8, store_f32
from engine.kernels.cpu.tiles import (
    PANEL,
    dot_int4,
    dot_int8,
    expand_int4,
    expand_int8,
    tile1,
    tile2,
    tile3,
    tile4,
    tile5,
    tile6,
)

FP32, INT8, INT4 = 0, 8, 4
WEIGHT, SCALES, BIAS, FORMAT, INPUTS, PANELS, SHARING = range(7)
NUM_FIELDS = 7
# Bytes from one row of a panel in fp32 to the next.
PANEL_STEP = 4 * PANEL
# Bytes of rows that stay in the second-level cache while the panels go by.
_ROWS_BYTES = 1 << 18
MAX_ROWS = 96


@njit(nogil=True, cache=True)
def multiply_rows(x, x_stride, w, step, k, out, out_stride, add, num_rows):
    """``out[r, 0:16] (+)= x[r] @ w`` for all rows, w ``[k, 16]``; strides count floats, ``step`` is
    the distance of w's rows in bytes."""
    row = 0
    while num_rows - row >= 6:
        at, to = x + 4 * row * x_stride, out + 4 * row * out_stride
        tile6(at, x_stride, w, step, k, to, out_stride, add)
        row += 6
    x += 4 * row * x_stride
    out += 4 * row * out_stride
    left = num_rows - row
    if left == 1:
        tile1(x, x_stride, w, step, k, out, out_stride, add)
    elif left == 2:
        tile2(x, x_stride, w, step, k, out, out_stride, add)
    elif left == 3:
        tile3(x, x_stride, w, step, k, out, out_stride, add)
    elif left == 4:
        tile4(x, x_stride, w, step, k, out, out_stride, add)
    elif left == 5:
        tile5(x, x_stride, w, step, k, out, out_stride, add)


@njit(nogil=True, cache=True)
def multiply_panel(
    entry, index, x, x_stride, sums, out, out_stride, add, num_rows, is_single, work
):
    """Rows times panel ``index``. ``is_single``: the step has one row, and ``sums`` are those of
    its groups. ``work`` has room for one panel in fp32."""
    k = entry[INPUTS]
    if entry[FORMAT] == FP32:
        panel = entry[WEIGHT] + index * k * PANEL * 4
        multiply_rows(x, x_stride, panel, PANEL_STEP, k, out, out_stride, add, num_rows)
    elif entry[FORMAT] == INT8:
        panel = entry[WEIGHT] + index * k * PANEL
        scales = entry[SCALES] + index * (k // entry[SHARING]) * PANEL * 4
        if is_single:
            dot_int8(x, panel, scales, k, entry[SHARING], out, add)
        else:
            expand_int8(panel, scales, k, entry[SHARING], work)
            multiply_rows(x, x_stride, work, PANEL_STEP, k, out, out_stride, add, num_rows)
    else:
        panel = entry[WEIGHT] + index * k * PANEL // 2
        scales = entry[SCALES] + index * (k // entry[SHARING]) * PANEL * 8
        if is_single:
            dot_int4(x, sums, panel, scales, k, out, add)
        else:
            expand_int4(panel, scales, k, work)
            multiply_rows(x, x_stride, work, PANEL_STEP, k, out, out_stride, add, num_rows)
    if entry[BIAS] != 0:
        for row in range(num_rows):
            add_to(entry[BIAS] + 4 * PANEL * index, out + 4 * row * out_stride, PANEL)


@njit(nogil=True, cache=True)
def block_rows(k, num_rows):
    """Rows that are multiplied by a panel before the next panel comes, a multiple of six."""
    fitting = max(24, _ROWS_BYTES // (4 * k) // 6 * 6)
    return min(num_rows, fitting, MAX_ROWS)


@njit(nogil=True, cache=True)
def sum_groups(entry, x, sums):
    """What int4 needs of a single row: its sums by group."""
    if entry[FORMAT] == INT4:
        sharing = entry[SHARING]
        for group in range(entry[INPUTS] // sharing):
            total = load_f32(x + 4 * sharing * group)
            for i in range(1, sharing):
                total += load_f32(x + 4 * (sharing * group + i))
            store_f32(total, sums + 4 * group)


@njit(nogil=True, cache=True)
def load_row(entry, row, out):
    """Row ``row`` of a weight (an embedding) as fp32."""
    k = entry[INPUTS]
    first = row // PANEL * k * PANEL + row % PANEL
    for i in range(k):
        at = first + i * PANEL
        if entry[FORMAT] == FP32:
            value = load_f32(entry[WEIGHT] + 4 * at)
        else:
            group = row // PANEL * (k // entry[SHARING]) + i // entry[SHARING]
            scale = load_f32(entry[SCALES] + 4 * (group * PANEL + row % PANEL))
            value = scale * load_i8(entry[WEIGHT] + at)
        store_f32(value, out + 4 * i)
