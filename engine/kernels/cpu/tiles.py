"""Panels times rows in registers, as intrinsics (simd.py says more of those).

A *panel* is 16 outputs of a weight, k after k: two vectors of eight lanes each (see packing.py).
"""

from typing import Any

from numba import types
from numba.extending import intrinsic

from engine.kernels.cpu.emit import F32, VF, VI32, ZERO, Emitter, Value

PANEL = 16
GROUP = 32  # inputs that share a scale
_HALF = 32  # bytes of eight fp32


def _tile(rows: int, unroll: int) -> Any:
    """out[r, 0:16] (+)= sum over k of x[r, k] * w[k, 0:16], for ``rows`` rows.

    ``step`` is the distance of w's rows in bytes, 64 in a panel. ``unroll`` turns go to
    accumulators of their own: a multiply-add takes four cycles and two begin in each, so eight must
    be under way."""

    @intrinsic
    def tile(
        typingctx: Any, x: Any, stride: Any, w: Any, step: Any, k: Any, out: Any, o: Any, add: Any
    ) -> Any:
        signature = types.void(*[types.int64] * 8)

        def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
            x, x_stride, w, step, num_k, out, out_stride, add = args
            e = Emitter(builder)
            rows_at = [e.at(x, builder.mul(x_stride, e.const(4 * r))) for r in range(rows)]

            def turn(k: Value, accumulators: list[Value], turns: int) -> list[Value]:
                new = list(accumulators)
                for u in range(turns):
                    panel_at = e.at(w, builder.mul(builder.add(k, e.const(u)), step))
                    low = e.load(VF, panel_at)
                    high = e.load(VF, e.at(panel_at, e.const(_HALF)))
                    for r in range(rows):
                        at = e.at(rows_at[r], builder.mul(k, e.const(4)), e.const(4 * u))
                        value = e.splat(e.load(F32, at))
                        i = 2 * (u * rows + r)
                        new[i] = e.fma(value, low, new[i])
                        new[i + 1] = e.fma(value, high, new[i + 1])
                return new

            whole = builder.sub(num_k, builder.urem(num_k, e.const(unroll)))
            sums = e.loop(
                e.const(0), whole, unroll, [ZERO] * (2 * rows * unroll),
                lambda k, carried: turn(k, carried, unroll),
            )  # fmt: skip
            folded = sums[: 2 * rows]
            for u in range(1, unroll):
                part = sums[2 * rows * u : 2 * rows * (u + 1)]
                folded = [builder.fadd(a, b) for a, b in zip(folded, part, strict=True)]
            if unroll > 1:
                folded = e.loop(whole, num_k, 1, folded, lambda k, carried: turn(k, carried, 1))
            keep = builder.icmp_signed("!=", add, e.const(0))
            for r in range(rows):
                row_at = e.at(out, builder.mul(out_stride, e.const(4 * r)))
                _finish(e, keep, folded[2 * r : 2 * r + 2], row_at)
            return context.get_dummy_value()

        return signature, generate

    return tile


def _finish(e: Emitter, keep: Value, halves: list[Value], row_at: Value) -> None:
    """Stores 16 sums, on top of what is there where ``keep``."""
    for half, value in enumerate(halves):
        at = e.at(row_at, e.const(_HALF * half))
        before = e.builder.select(keep, e.load(VF, at), ZERO)
        e.store(e.builder.fadd(before, value), at)


tile1, tile2, tile3 = _tile(1, 4), _tile(2, 2), _tile(3, 2)
tile4, tile5, tile6 = _tile(4, 1), _tile(5, 1), _tile(6, 1)


@intrinsic
def dot_int8(
    typingctx: Any, x: Any, w: Any, scales: Any, k: Any, group: Any, out: Any, add: Any
) -> Any:
    """One row times a panel of int8: out[0:16] (+)= sum over groups of scale * sum of q * x."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        x, w, scales, num_k, group, out, add = args
        e = Emitter(builder)

        def inner(k: Value, carried: list[Value]) -> list[Value]:
            new = list(carried)
            for u in range(4):
                at = e.at(w, builder.mul(k, e.const(PANEL)), e.const(PANEL * u))
                value = e.splat(e.load(F32, e.at(x, builder.mul(k, e.const(4)), e.const(4 * u))))
                for half in range(2):
                    q = e.floats_of_bytes(e.at(at, e.const(8 * half)))
                    new[2 * u + half] = e.fma(value, q, new[2 * u + half])
            return new

        def of_group(start: Value, carried: list[Value]) -> list[Value]:
            k = builder.mul(start, group)
            sums = e.loop(k, e.at(k, group), 4, [ZERO] * 8, inner)
            at = e.at(scales, builder.mul(start, e.const(4 * PANEL)))
            return [
                e.fma(e.load(VF, e.at(at, e.const(_HALF * half))), _fold(e, sums[half::2]), total)
                for half, total in enumerate(carried)
            ]

        totals = e.loop(e.const(0), builder.sdiv(num_k, group), 1, [ZERO] * 2, of_group)
        _finish(e, builder.icmp_signed("!=", add, e.const(0)), totals, out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@intrinsic
def dot_int4(
    typingctx: Any, x: Any, sums: Any, w: Any, scales: Any, k: Any, out: Any, add: Any
) -> Any:
    """One row times a panel of int4, whose values are q * scale + minimum by group of 32:
    out[0:16] (+)= sum over groups of scale * sum of q * x + minimum * sum of x.
    ``sums`` are the sums of x by group; each group has 16 scales, then 16 minima."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        x, sums, w, scales, num_k, out, add = args
        e = Emitter(builder)

        def of_group(index: Value, carried: list[Value]) -> list[Value]:
            accumulators = [ZERO] * 8
            words_at = e.at(w, builder.mul(index, e.const(GROUP * PANEL // 2)))
            x_at = e.at(x, builder.mul(index, e.const(4 * GROUP)))
            for eight in range(GROUP // 8):
                at = e.at(words_at, e.const(eight * 8 * PANEL // 2))
                words = [e.load(VI32, at), e.load(VI32, e.at(at, e.const(_HALF)))]
                for kk in range(8):
                    value = e.splat(e.load(F32, e.at(x_at, e.const(4 * (8 * eight + kk)))))
                    for half in range(2):
                        i = 2 * (kk % 4) + half
                        accumulators[i] = e.fma(value, e.nibble(words[half], kk), accumulators[i])
            total_x = e.splat(e.load(F32, e.at(sums, builder.mul(index, e.const(4)))))
            at = e.at(scales, builder.mul(index, e.const(8 * PANEL)))
            new = []
            for half, total in enumerate(carried):
                scale = e.load(VF, e.at(at, e.const(_HALF * half)))
                minimum = e.load(VF, e.at(at, e.const(4 * PANEL + _HALF * half)))
                total = e.fma(scale, _fold(e, accumulators[half::2]), total)
                new.append(e.fma(minimum, total_x, total))
            return new

        totals = e.loop(e.const(0), builder.sdiv(num_k, e.const(GROUP)), 1, [ZERO] * 2, of_group)
        _finish(e, builder.icmp_signed("!=", add, e.const(0)), totals, out)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _fold(e: Emitter, parts: list[Value]) -> Value:
    return e.builder.fadd(e.builder.fadd(parts[0], parts[1]), e.builder.fadd(parts[2], parts[3]))


@intrinsic
def expand_int8(typingctx: Any, w: Any, scales: Any, k: Any, group: Any, out: Any) -> Any:
    """A panel of int8 as fp32: out[k, 0:16] = q * scale."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        w, scales, num_k, group, out = args
        e = Emitter(builder)

        def of_group(index: Value, carried: list[Value]) -> list[Value]:
            k = builder.mul(index, group)
            at = e.at(scales, builder.mul(index, e.const(4 * PANEL)))
            scale = [e.load(VF, e.at(at, e.const(_HALF * half))) for half in range(2)]

            def turn(k: Value, carried: list[Value]) -> list[Value]:
                for half in range(2):
                    at = e.at(w, builder.mul(k, e.const(PANEL)), e.const(8 * half))
                    to = e.at(out, builder.mul(k, e.const(4 * PANEL)), e.const(_HALF * half))
                    e.store(builder.fmul(e.floats_of_bytes(at), scale[half]), to)
                return carried

            e.loop(k, e.at(k, group), 1, [], turn)
            return carried

        e.loop(e.const(0), builder.sdiv(num_k, group), 1, [], of_group)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def expand_int4(typingctx: Any, w: Any, scales: Any, k: Any, out: Any) -> Any:
    """A panel of int4 as fp32: out[k, 0:16] = q * scale + minimum."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        w, scales, num_k, out = args
        e = Emitter(builder)

        def of_eight(index: Value, carried: list[Value]) -> list[Value]:
            group = builder.sdiv(index, e.const(GROUP // 8))
            scale_at = e.at(scales, builder.mul(group, e.const(8 * PANEL)))
            for half in range(2):
                at = e.at(scale_at, e.const(_HALF * half))
                scale, minimum = e.load(VF, at), e.load(VF, e.at(at, e.const(4 * PANEL)))
                at = e.at(w, builder.mul(index, e.const(4 * PANEL)), e.const(_HALF * half))
                words = e.load(VI32, at)
                to = e.at(out, builder.mul(index, e.const(32 * PANEL)), e.const(_HALF * half))
                for kk in range(8):
                    value = e.fma(e.nibble(words, kk), scale, minimum)
                    e.store(value, e.at(to, e.const(4 * PANEL * kk)))
            return carried

        e.loop(e.const(0), builder.sdiv(num_k, e.const(8)), 1, [], of_eight)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate
