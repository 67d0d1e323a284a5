"""float64 lanes for the encoders: sixteen doubles beside the sixteen floats of ``simd``.

Every operation is one IEEE operation of its own, sums over lanes are fixed trees: the same bits on
every CPU. Only what is written as ``fma64`` is fused.
"""

import operator

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic

from kvkernels.cpu.kernels.simd import (
    F32V,
    I32,
    I32V,
    LANES,
    F32x16,
    I32x16,
    Vector,
    _element,
    call_llvm,
    const_vector,
    load_value,
    splat_value,
)

F64, I64 = ir.DoubleType(), ir.IntType(64)
F64V, I64V = ir.VectorType(F64, LANES), ir.VectorType(I64, LANES)
F64x16 = Vector("F64x16", F64V)

for _operation, _method in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):

    @infer_global(_operation)
    class _Arithmetic(ConcreteTemplate):
        cases = [signature(F64x16, F64x16, F64x16)]  # noqa: RUF012 - Numba's protocol

    @lower_builtin(_operation, F64x16, F64x16)
    def _lower(_context, builder, _signature, args, method=_method):
        return getattr(builder, method)(args[0], args[1])


# --- conversions and memory
# -------------------------------------------------------------------------


@intrinsic
def widen(_, value):
    """float32 lanes as float64, exact."""
    return F64x16(F32x16), lambda _c, b, _s, a: b.fpext(a[0], F64V)


@intrinsic
def narrow(_, value):
    """float64 lanes rounded to float32."""
    return F32x16(F64x16), lambda _c, b, _s, a: b.fptrunc(a[0], F32V)


@intrinsic
def splat64(_, value):
    """All lanes = ``value`` (float64)."""
    return F64x16(types.float64), lambda _c, b, _s, a: splat_value(b, a[0], F64V)


@intrinsic
def load64(_, array, index):
    """16 x float64 from ``array[index:]``."""
    if array.dtype != types.float64:
        return None

    def codegen(context, builder, sig, args):
        return load_value(builder, _element(context, builder, sig.args[0], *args), F64V, 8)

    return F64x16(array, types.int64), codegen


@intrinsic
def store64(_, array, index, value):
    """``array[index : index + 16] = value`` (float64)."""
    if array.dtype != types.float64 or value != F64x16:
        return None

    def codegen(context, builder, sig, args):
        pointer = _element(context, builder, sig.args[0], args[0], args[1])
        builder.store(args[2], builder.bitcast(pointer, F64V.as_pointer())).align = 8
        return context.get_dummy_value()

    return types.void(array, types.int64, F64x16), codegen


@intrinsic
def store_codes(_, array, index, value):
    """``array[index : index + 16] = value``: whole numbers in 0..255, into a uint8 array."""
    if array.dtype != types.uint8 or value != F64x16:
        return None

    def codegen(context, builder, sig, args):
        pointer = _element(context, builder, sig.args[0], args[0], args[1])
        kind = ir.VectorType(ir.IntType(8), LANES)
        narrowed = builder.trunc(builder.fptosi(args[2], I32V), kind)
        builder.store(narrowed, builder.bitcast(pointer, kind.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(array, types.int64, F64x16), codegen


@intrinsic
def store_whole(_, array, index, value):
    """The same from float32 lanes."""
    if array.dtype != types.uint8 or value != F32x16:
        return None

    def codegen(context, builder, sig, args):
        pointer = _element(context, builder, sig.args[0], args[0], args[1])
        kind = ir.VectorType(ir.IntType(8), LANES)
        narrowed = builder.trunc(builder.fptosi(args[2], I32V), kind)
        builder.store(narrowed, builder.bitcast(pointer, kind.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(array, types.int64, F32x16), codegen


@intrinsic
def product(_, a, b):
    """a * b of float32 lanes, never fused with what is done to it."""
    return F32x16(F32x16, F32x16), lambda _c, builder, _s, args: builder.fmul(*args)


@intrinsic
def half_away(_, value):
    """Float32 lanes >= 0 rounded to whole numbers, halves up, exactly."""

    def codegen(_context, builder, _signature, args):
        whole = call_llvm(builder, "llvm.floor.v16f32", F32V, args)
        rest = builder.fsub(args[0], whole)
        up = builder.fcmp_ordered(">=", rest, const_vector(F32V, [0.5] * LANES))
        one, zero = const_vector(F32V, [1.0] * LANES), const_vector(F32V, [0.0] * LANES)
        return builder.fadd(whole, builder.select(up, one, zero))

    return F32x16(F32x16), codegen


# --- lanes
# ------------------------------------------------------------------------------------------


@intrinsic
def fma64(_, a, b, c):
    """a * b + c, one rounding."""

    def codegen(_context, builder, _signature, args):
        return call_llvm(builder, "llvm.fma.v16f64", F64V, args)

    return F64x16(F64x16, F64x16, F64x16), codegen


def _unary(name):
    @intrinsic
    def operation(_, a):
        return F64x16(F64x16), lambda _c, b, _s, x: call_llvm(b, f"llvm.{name}.v16f64", F64V, x)

    return operation


sqrt64 = _unary("sqrt")
abs64 = _unary("fabs")
#: nearest whole number, ties to even
round64 = _unary("nearbyint")


def _choice(relation):
    @intrinsic
    def operation(_, a, b):
        def codegen(_context, builder, _signature, args):
            return builder.select(builder.fcmp_ordered(relation, *args), *args)

        return F64x16(F64x16, F64x16), codegen

    return operation


max64, min64 = _choice(">"), _choice("<")


@intrinsic
def where_less(_, a, b, yes, no):
    """``yes`` where a < b, else ``no``."""

    def codegen(_context, builder, _signature, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return F64x16(F64x16, F64x16, F64x16, F64x16), codegen


@intrinsic
def differ(_, a, b):
    """Bit i is set where float32 lane i of a and b differ."""

    def codegen(_context, builder, _signature, args):
        mask = builder.bitcast(builder.fcmp_unordered("!=", *args), ir.IntType(LANES))
        return builder.zext(mask, I64)

    return types.int64(F32x16, F32x16), codegen


def _shuffled(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


@intrinsic
def sum64(_, value):
    """Sum of the lanes as a fixed tree."""

    def codegen(_context, builder, _signature, args):
        vector = args[0]
        while (half := vector.type.count // 2) > 0:
            low = _shuffled(builder, vector, vector, list(range(half)))
            high = _shuffled(builder, vector, vector, list(range(half, 2 * half)))
            vector = builder.fadd(low, high)
        return builder.extract_element(vector, I32(0))

    return types.float64(F64x16), codegen


@intrinsic
def store_sums(_, array, index, a, b, c, d):
    """``array[index : index + 4]`` = the four lane sums, as one tree of shuffles."""
    if array.dtype != types.float64:
        return None

    def codegen(context, builder, sig, args):
        vectors = [
            builder.fadd(
                _shuffled(builder, v, v, list(range(8))),
                _shuffled(builder, v, v, list(range(8, 16))),
            )
            for v in args[2:]
        ]
        width = 4
        while len(vectors) > 1:  # two vectors of 8 become one: halves of each added side by side
            low = [i for base in range(0, 8, 2 * width) for i in range(base, base + width)]
            high = [i + width for i in low]
            vectors = [
                builder.fadd(
                    _shuffled(builder, x, y, low + [8 + i for i in low]),
                    _shuffled(builder, x, y, high + [8 + i for i in high]),
                )
                for x, y in zip(vectors[::2], vectors[1::2], strict=True)
            ]
            width //= 2
        last = vectors[0]
        even, odd = list(range(0, 8, 2)), list(range(1, 8, 2))
        sums = builder.fadd(
            _shuffled(builder, last, last, even), _shuffled(builder, last, last, odd)
        )
        pointer = _element(context, builder, sig.args[0], args[0], args[1])
        builder.store(sums, builder.bitcast(pointer, sums.type.as_pointer())).align = 8
        return context.get_dummy_value()

    return types.void(array, types.int64, F64x16, F64x16, F64x16, F64x16), codegen


# --- fields of codes, for packing
# -------------------------------------------------------------------


@intrinsic
def load_codes(_, array, index):
    """16 bytes of a uint8 array as int32 lanes."""
    if array.dtype != types.uint8:
        return None

    def codegen(context, builder, sig, args):
        kind = ir.VectorType(ir.IntType(8), LANES)
        pointer = _element(context, builder, sig.args[0], *args)
        return builder.zext(load_value(builder, pointer, kind, 1), I32V)

    return I32x16(array, types.int64), codegen


@intrinsic
def load_words(_, array, index):
    """64 bytes of a uint8 array as int32 lanes, little endian."""
    if array.dtype != types.uint8:
        return None

    def codegen(context, builder, sig, args):
        return load_value(builder, _element(context, builder, sig.args[0], *args), I32V, 1)

    return I32x16(array, types.int64), codegen


@intrinsic
def store_words(_, array, index, value):
    """64 bytes of a uint8 array = int32 lanes, little endian."""
    if array.dtype != types.uint8 or value != I32x16:
        return None

    def codegen(context, builder, sig, args):
        pointer = _element(context, builder, sig.args[0], args[0], args[1])
        builder.store(args[2], builder.bitcast(pointer, I32V.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(array, types.int64, I32x16), codegen


def _splat_int(builder, value):
    return splat_value(builder, builder.trunc(value, I32), I32V)


@intrinsic
def whole(_, value):
    """All int32 lanes = ``value``."""
    return I32x16(types.int64), lambda _c, b, _s, a: _splat_int(b, a[0])


@intrinsic
def either(_, a, b):
    """Bitwise or of int32 lanes."""
    return I32x16(I32x16, I32x16), lambda _c, builder, _s, args: builder.or_(*args)


@intrinsic
def field(_, value, down, mask, up):
    """``((value >> down) & mask) << up`` of int32 lanes."""

    def codegen(_context, builder, _signature, args):
        down, mask, up = (_splat_int(builder, a) for a in args[1:])
        return builder.shl(builder.and_(builder.lshr(args[0], down), mask), up)

    return I32x16(I32x16, types.int64, types.int64, types.int64), codegen


# --- logarithm and exponential
# ----------------------------------------------------------------------

_ROOT_HALF = 0x3F3504F3  # bits of sqrt(1/2) in float32


def _exponent(builder, value):
    bits = builder.sub(builder.bitcast(value, I32V), const_vector(I32V, [_ROOT_HALF] * LANES))
    return builder.ashr(bits, const_vector(I32V, [23] * LANES))


@intrinsic
def exponent(_, value):
    """k of value = m * 2**k with m in [sqrt(1/2), sqrt(2)); value positive and normal."""
    return F64x16(F32x16), lambda _c, b, _s, a: b.sitofp(_exponent(b, a[0]), F64V)


@intrinsic
def mantissa(_, value):
    """m of the same."""

    def codegen(_context, builder, _signature, args):
        shift = builder.shl(_exponent(builder, args[0]), const_vector(I32V, [23] * LANES))
        bits = builder.sub(builder.bitcast(args[0], I32V), shift)
        return builder.fpext(builder.bitcast(bits, F32V), F64V)

    return F64x16(F32x16), codegen


@intrinsic
def power_of_two64(_, whole):
    """2**n for whole lanes n in [-1000, 1000]."""

    def codegen(_context, builder, _signature, args):
        number = builder.sext(builder.fptosi(args[0], I32V), I64V)
        biased = builder.add(number, const_vector(I64V, [1023] * LANES))
        return builder.bitcast(builder.shl(biased, const_vector(I64V, [52] * LANES)), F64V)

    return F64x16(F64x16), codegen
