"""Helpers that write LLVM IR for the intrinsics of simd.py: vectors of eight fp32, and loops."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

I8, I32, I64, F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
LANES = 8
VF = ir.VectorType(F32, LANES)
VI8, VI32 = ir.VectorType(I8, LANES), ir.VectorType(I32, LANES)
_SPLAT = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
ZERO = ir.Constant(VF, [0.0] * LANES)
_EXP = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip
Value = Any


class Emitter:
    """Wraps a numba intrinsic's builder. Addresses are i64, offsets in bytes."""

    def __init__(self, builder: Value) -> None:
        self.builder = builder

    def const(self, value: int) -> Value:
        return ir.Constant(I64, value)

    def at(self, address: Value, *offsets: Value) -> Value:
        for offset in offsets:
            address = self.builder.add(address, offset)
        return address

    def load(self, kind: Value, address: Value, align: int = 4) -> Value:
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        loaded = self.builder.load(pointer)
        loaded.align = align
        return loaded

    def store(self, value: Value, address: Value, align: int = 4) -> None:
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=align)

    def splat(self, scalar: Value) -> Value:
        """A scalar in all lanes."""
        vector_type = ir.VectorType(scalar.type, LANES)
        vector = ir.Constant(vector_type, ir.Undefined)
        vector = self.builder.insert_element(vector, scalar, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(vector, vector, _SPLAT)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        kind = ir.FunctionType(VF, [VF, VF, VF])
        function = cgutils.get_or_insert_function(
            self.builder.module, kind, f"llvm.fma.v{LANES}f32"
        )
        return self.builder.call(function, [a, b, c])

    def floats_of_bytes(self, address: Value) -> Value:
        """Eight int8 as fp32."""
        integers = self.builder.sext(self.load(VI8, address, align=1), VI32)
        return self.builder.sitofp(integers, VF)

    def nibble(self, words: Value, index: int) -> Value:
        """Nibble ``index`` of each of eight words, as fp32 0..15."""
        if index:
            words = self.builder.lshr(words, self.splat(ir.Constant(I32, 4 * index)))
        if index < 7:
            words = self.builder.and_(words, self.splat(ir.Constant(I32, 15)))
        return self.builder.sitofp(words, VF)

    def vector(self, value: float) -> Value:
        return ir.Constant(VF, [value] * LANES)

    def exp(self, x: Value) -> Value:
        """e to the x in eight lanes, to 2e-7: x = n ln 2 + r, a polynomial of r, and n put into the
        exponent's bits (Cephes, expf). Below -87 it gives 1e-38, above 88 it gives 1.6e38."""
        b = self.builder
        x = self._clamp(x, -87.0, 88.0)
        # Adding 1.5 x 2^23 rounds to a whole number.
        magic = self.vector(12582912.0)
        n = b.fsub(self.fma(x, self.vector(1.4426950408889634), magic), magic)
        r = self.fma(n, self.vector(-0.693359375), x)
        r = self.fma(n, self.vector(2.12194440e-4), r)
        y = self.vector(_EXP[0])
        for factor in _EXP[1:]:
            y = self.fma(y, r, self.vector(factor))
        y = b.fadd(self.fma(y, b.fmul(r, r), r), self.vector(1.0))
        bias, shift = ir.Constant(VI32, [127] * LANES), ir.Constant(VI32, [23] * LANES)
        power = b.shl(b.add(b.fptosi(n, VI32), bias), shift)
        return b.fmul(y, b.bitcast(power, VF))

    def _clamp(self, x: Value, low: float, high: float) -> Value:
        b = self.builder
        x = b.select(b.fcmp_ordered("<", x, self.vector(low)), self.vector(low), x)
        # Not a number stays what it is: the comparison is false for it.
        return b.select(b.fcmp_ordered(">", x, self.vector(high)), self.vector(high), x)

    def larger(self, a: Value, b: Value) -> Value:
        """Of each lane, or of two scalars; not a number where ``a`` is none."""
        return self.builder.select(self.builder.fcmp_ordered("<=", a, b), b, a)

    def sum_lanes(self, vector: Value) -> Value:
        for width in (4, 2, 1):
            indices = ir.Constant(ir.VectorType(I32, width), list(range(width, 2 * width)))
            low = ir.Constant(ir.VectorType(I32, width), list(range(width)))
            upper = self.builder.shuffle_vector(vector, vector, indices)
            vector = self.builder.fadd(self.builder.shuffle_vector(vector, vector, low), upper)
        return self.builder.extract_element(vector, ir.Constant(I32, 0))

    def loop(
        self,
        start: Value,
        stop: Value,
        step: int,
        carried: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
    ) -> list[Value]:
        """``for i in range(start, stop, step)`` with values carried from turn to turn in
        registers; returns them after the last turn."""
        builder = self.builder
        before = builder.basic_block
        head = builder.append_basic_block("loop")
        inside = builder.append_basic_block("body")
        after = builder.append_basic_block("done")
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(I64)
        phis = [builder.phi(value.type) for value in carried]
        builder.cbranch(builder.icmp_signed("<", index, stop), inside, after)
        builder.position_at_end(inside)
        new = body(index, phis)
        following = builder.add(index, self.const(step))
        end = builder.basic_block
        builder.branch(head)
        index.add_incoming(start, before)
        index.add_incoming(following, end)
        for phi, first, later in zip(phis, carried, new, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, end)
        builder.position_at_end(after)
        return phis
