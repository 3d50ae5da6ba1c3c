"""Instructions that numba has no words for, as intrinsics: loops over vectors, prefetch, atomics.

All pointers are addresses (int64), since one table holds those of weights of every format.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.kernels.cpu.emit import F32, I8, I32, I64, LANES, VF, ZERO, Emitter, Value


@intrinsic
def dot(typingctx: Any, a: Any, b: Any, n: Any) -> Any:
    """Sum of a[i] * b[i]; n is a multiple of 8."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        a, b, n = args
        e = Emitter(builder)

        def turn(i: Value, carried: list[Value]) -> list[Value]:
            offset = builder.mul(i, e.const(4))
            left, right = e.load(VF, e.at(a, offset)), e.load(VF, e.at(b, offset))
            return [carried[1], e.fma(left, right, carried[0])]

        first, second = e.loop(e.const(0), n, 8, [ZERO, ZERO], turn)
        return e.sum_lanes(builder.fadd(first, second))

    return types.float32(types.int64, types.int64, types.int64), generate


@intrinsic
def add_scaled(typingctx: Any, scale: Any, a: Any, out: Any, n: Any) -> Any:
    """out[i] += scale * a[i]; n is a multiple of 8."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        scale, a, out, n = args
        e = Emitter(builder)
        factor = e.splat(scale)

        def turn(i: Value, carried: list[Value]) -> list[Value]:
            offset = builder.mul(i, e.const(4))
            to = e.at(out, offset)
            e.store(e.fma(factor, e.load(VF, e.at(a, offset)), e.load(VF, to)), to)
            return carried

        e.loop(e.const(0), n, 8, [], turn)
        return context.get_dummy_value()

    return types.void(types.float32, types.int64, types.int64, types.int64), generate


@intrinsic
def add_to(typingctx: Any, a: Any, out: Any, n: Any) -> Any:
    """out[i] += a[i]; n is a multiple of 8."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        a, out, n = args
        e = Emitter(builder)

        def turn(i: Value, carried: list[Value]) -> list[Value]:
            offset = builder.mul(i, e.const(4))
            to = e.at(out, offset)
            e.store(builder.fadd(e.load(VF, e.at(a, offset)), e.load(VF, to)), to)
            return carried

        e.loop(e.const(0), n, 8, [], turn)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def scale_all(typingctx: Any, scale: Any, values: Any, n: Any) -> Any:
    """values[i] *= scale; n is a multiple of 8."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        scale, values, n = args
        e = Emitter(builder)
        factor = e.splat(scale)

        def turn(i: Value, carried: list[Value]) -> list[Value]:
            at = e.at(values, builder.mul(i, e.const(4)))
            e.store(builder.fmul(factor, e.load(VF, at)), at)
            return carried

        e.loop(e.const(0), n, 8, [], turn)
        return context.get_dummy_value()

    return types.void(types.float32, types.int64, types.int64), generate


@intrinsic
def zero(typingctx: Any, values: Any, n: Any) -> Any:
    """values[i] = 0; n is a multiple of 8."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        values, n = args
        e = Emitter(builder)

        def turn(i: Value, carried: list[Value]) -> list[Value]:
            e.store(ZERO, e.at(values, builder.mul(i, e.const(4))))
            return carried

        e.loop(e.const(0), n, 8, [], turn)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def scaled_product(typingctx: Any, scale: Any, a: Any, b: Any, out: Any, n: Any) -> Any:
    """out[i] = scale * a[i] * b[i]; n is a multiple of 8."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        scale, a, b, out, n = args
        e = Emitter(builder)
        factor = e.splat(scale)

        def turn(i: Value, carried: list[Value]) -> list[Value]:
            offset = builder.mul(i, e.const(4))
            left = builder.fmul(factor, e.load(VF, e.at(a, offset)))
            e.store(builder.fmul(left, e.load(VF, e.at(b, offset))), e.at(out, offset))
            return carried

        e.loop(e.const(0), n, 8, [], turn)
        return context.get_dummy_value()

    return types.void(types.float32, *[types.int64] * 4), generate


@intrinsic
def silu_product(typingctx: Any, gate: Any, up: Any, out: Any, n: Any) -> Any:
    """out[i] = gate[i] / (1 + exp(-gate[i])) * up[i]; n is a multiple of 8."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        gate, up, out, n = args
        e = Emitter(builder)

        def turn(i: Value, carried: list[Value]) -> list[Value]:
            offset = builder.mul(i, e.const(4))
            g = e.load(VF, e.at(gate, offset))
            below = builder.fadd(e.vector(1.0), e.exp(builder.fsub(ZERO, g)))
            product = builder.fmul(builder.fdiv(g, below), e.load(VF, e.at(up, offset)))
            e.store(product, e.at(out, offset))
            return carried

        e.loop(e.const(0), n, 8, [], turn)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def largest_of(typingctx: Any, values: Any, n: Any) -> Any:
    """n is a multiple of 8, and not 0."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        values, n = args
        e = Emitter(builder)

        def turn(i: Value, carried: list[Value]) -> list[Value]:
            value = e.load(VF, e.at(values, builder.mul(i, e.const(4))))
            return [e.larger(value, carried[0])]

        (top,) = e.loop(e.const(0), n, 8, [e.load(VF, values)], turn)
        largest = builder.extract_element(top, ir.Constant(I32, 0))
        for lane in range(1, LANES):
            largest = e.larger(builder.extract_element(top, ir.Constant(I32, lane)), largest)
        return largest

    return types.float32(types.int64, types.int64), generate


@intrinsic
def exp_all(typingctx: Any, values: Any, n: Any, largest: Any) -> Any:
    """values[i] = exp(values[i] - largest); returns their sum. n is a multiple of 8."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        values, n, largest = args
        e = Emitter(builder)
        top = e.splat(largest)

        def turn(i: Value, carried: list[Value]) -> list[Value]:
            at = e.at(values, builder.mul(i, e.const(4)))
            value = e.exp(builder.fsub(e.load(VF, at), top))
            e.store(value, at)
            return [builder.fadd(carried[0], value)]

        (total,) = e.loop(e.const(0), n, 8, [ZERO], turn)
        return e.sum_lanes(total)

    return types.float32(types.int64, types.int64, types.float32), generate


@intrinsic
def load_f32(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        return Emitter(builder).load(F32, args[0])

    return types.float32(types.int64), generate


@intrinsic
def load_i8(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        return Emitter(builder).load(I8, args[0], align=1)

    return types.int8(types.int64), generate


@intrinsic
def store_f32(typingctx: Any, value: Any, address: Any) -> Any:
    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        Emitter(builder).store(args[0], args[1])
        return context.get_dummy_value()

    return types.void(types.float32, types.int64), generate


@intrinsic
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Adds to an int64 in memory; returns what was there before."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_load(typingctx: Any, address: Any) -> Any:
    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def prefetch(typingctx: Any, address: Any, num_bytes: Any) -> Any:
    """Asks for memory that will be read soon, line by line; the address may be any."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        address, num_bytes = args
        e = Emitter(builder)
        pointer = I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, keep, data = (ir.Constant(I32, value) for value in (0, 3, 1))

        def turn(offset: Value, carried: list[Value]) -> list[Value]:
            at = builder.inttoptr(e.at(address, offset), pointer)
            builder.call(function, [at, read, keep, data])
            return carried

        e.loop(e.const(0), num_bytes, 64, [], turn)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def yield_core(typingctx: Any) -> Any:
    """Lets another thread have this core (sched_yield)."""

    def generate(context: Any, builder: Value, sig: Any, args: Any) -> Value:
        kind = ir.FunctionType(I32, [])
        function = cgutils.get_or_insert_function(builder.module, kind, "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate
