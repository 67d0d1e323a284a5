"""A small SIMD vocabulary for Numba: 16-lane vectors that lower to LLVM vectors.

``F32x16`` and ``I32x16`` are values inside ``@kernel`` functions; ``+ - * /`` work on them, the
rest are the functions below. LLVM splits 16 lanes into what the CPU has (one zmm, two ymm, four
NEON registers), so the same source is right on every CPU. Offsets are in elements of the array;
arrays are C-contiguous and flat.
"""

import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.datamodel.registry import register_default
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic

from kvkernels.cpu.kernels.jit import inner

LANES = 16
I32, F32 = ir.IntType(32), ir.FloatType()
I32V, F32V = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)


class Vector(types.Type):
    """Numba type of one vector value; ``llvm`` is its LLVM type."""

    def __init__(self, name, llvm):
        self.llvm = llvm
        super().__init__(name=name)


@register_default(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.llvm)


F32x16 = Vector("F32x16", F32V)
I32x16 = Vector("I32x16", I32V)


# --- building blocks for code generators (take an ir.IRBuilder)
# -------------------------------------


def const_vector(llvm, values):
    """A constant vector from a list of Python numbers."""
    return ir.Constant(llvm, list(values))


def splat_value(builder, value, llvm):
    """Broadcast a scalar to all lanes."""
    first = builder.insert_element(ir.Constant(llvm, ir.Undefined), value, I32(0))
    lanes = ir.Constant(ir.VectorType(I32, llvm.count), [0] * llvm.count)
    return builder.shuffle_vector(first, ir.Constant(llvm, ir.Undefined), lanes)


def call_llvm(builder, name, result, args):
    """Call an LLVM intrinsic by its mangled name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def fma_value(builder, a, b, c):
    """a * b + c with one rounding."""
    return call_llvm(builder, "llvm.fma.v16f32", F32V, [a, b, c])


def load_value(builder, pointer, llvm, align):
    """Load ``llvm`` from a pointer of any element type."""
    value = builder.load(builder.bitcast(pointer, llvm.as_pointer()))
    value.align = align
    return value


def _element(context, builder, array_type, array, index):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


# --- arithmetic operators
# ---------------------------------------------------------------------------

for _operation, _method in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):

    @infer_global(_operation)
    class _Arithmetic(ConcreteTemplate):
        cases = [signature(F32x16, F32x16, F32x16)]  # noqa: RUF012 - Numba's protocol

    @lower_builtin(_operation, F32x16, F32x16)
    def _lower(_context, builder, _signature, args, method=_method):
        return getattr(builder, method)(args[0], args[1], flags=("contract", "nsz"))


# --- memory
# -----------------------------------------------------------------------------------------


def _loader(element, llvm, result, align, convert=None):
    @intrinsic
    def load(_, array, index):
        if array.dtype != element:
            return None

        def codegen(context, builder, sig, args):
            pointer = _element(context, builder, sig.args[0], args[0], args[1])
            value = load_value(builder, pointer, llvm, align)
            return convert(builder, value) if convert else value

        return result(array, types.int64), codegen

    return load


#: 16 x float32 from ``array[index:]``
load = _loader(types.float32, F32V, F32x16, 4)
#: 16 x fp16 (a ``uint16`` array) widened to float32
load_half = _loader(
    types.uint16,
    ir.VectorType(ir.HalfType(), LANES),
    F32x16,
    2,
    lambda builder, value: builder.fpext(value, F32V),
)


@intrinsic
def store(_, array, index, value):
    """``array[index : index + 16] = value`` (float32)."""
    if array.dtype != types.float32 or value != F32x16:
        return None

    def codegen(context, builder, sig, args):
        pointer = _element(context, builder, sig.args[0], args[0], args[1])
        done = builder.store(args[2], builder.bitcast(pointer, F32V.as_pointer()))
        done.align = 4
        return context.get_dummy_value()

    return types.void(array, types.int64, F32x16), codegen


# --- lanes
# ------------------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def store_bytes(_, array, index, a, b, which):
    """``array[index : index + 32] =`` byte ``which`` (0 is the lowest) of the int32 lanes of a,
    then b.
    """
    if array.dtype != types.uint8 or not isinstance(which, types.IntegerLiteral):
        return None
    byte = which.literal_value

    def codegen(context, builder, sig, args):
        pointer = _element(context, builder, sig.args[0], args[0], args[1])
        wide, kind = (
            ir.VectorType(ir.IntType(8), 4 * LANES),
            ir.VectorType(ir.IntType(8), 2 * LANES),
        )
        lanes = ir.Constant(ir.VectorType(I32, 2 * LANES), [4 * i + byte for i in range(2 * LANES)])
        parts = [builder.bitcast(x, wide) for x in args[2:4]]
        narrow = builder.shuffle_vector(*parts, lanes)
        builder.store(narrow, builder.bitcast(pointer, kind.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(array, types.int64, I32x16, I32x16, which), codegen


@intrinsic
def splat(_, value):
    """All lanes = ``value``."""
    if value != types.float32:
        return None
    return F32x16(types.float32), lambda _c, b, _s, a: splat_value(b, a[0], F32V)


@intrinsic
def fma(_, a, b, c):
    """a * b + c, one rounding."""
    return F32x16(F32x16, F32x16, F32x16), lambda _c, bld, _s, args: fma_value(bld, *args)


@intrinsic
def vabs(_, a):
    """Absolute value."""
    return F32x16(F32x16), lambda _c, b, _s, x: call_llvm(b, "llvm.fabs.v16f32", F32V, [x[0]])


@intrinsic
def round_up_byte(_, a):
    """int32 lanes + 128: then byte 1 is the high half of an int16 whose low byte counts as
    signed.
    """

    def codegen(_context, builder, _signature, args):
        return builder.add(args[0], const_vector(I32V, [128] * LANES))

    return I32x16(I32x16), codegen


@intrinsic
def vmax(_, a, b):
    """Larger lane; a NaN in ``a`` gives ``b``."""

    def codegen(_context, builder, _signature, args):
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

    return F32x16(F32x16, F32x16), codegen


@intrinsic
def vmin(_, a, b):
    """Smaller lane; a NaN in ``a`` gives ``b``."""

    def codegen(_context, builder, _signature, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[0], args[1])

    return F32x16(F32x16, F32x16), codegen


@intrinsic
def first(_, value):
    """Lane 0 as a scalar."""
    return types.float32(F32x16), lambda _c, b, _s, a: b.extract_element(a[0], I32(0))


@intrinsic
def where_between(_, value, first, low, high, other):
    """Lane ``i`` of ``value`` where ``low <= first + i < high``, else ``other``:
    bits of hidden lanes are dropped.
    """

    def codegen(_context, builder, _signature, args):
        value, first, low, high, other = args
        narrow = [splat_value(builder, builder.trunc(x, I32), I32V) for x in (first, low, high)]
        lane = builder.add(narrow[0], const_vector(I32V, range(LANES)))
        inside = builder.and_(
            builder.icmp_signed(">=", lane, narrow[1]), builder.icmp_signed("<", lane, narrow[2])
        )
        return builder.select(inside, value, splat_value(builder, other, F32V))

    return F32x16(F32x16, types.int64, types.int64, types.int64, types.float32), codegen


@intrinsic
def zero_unless_positive(_, value, gate):
    """``value`` where ``gate > 0``, else 0: keeps NaN next to a zero probability out of a
    product.
    """

    def codegen(_context, builder, _signature, args):
        zero = const_vector(F32V, [0.0] * LANES)
        return builder.select(builder.fcmp_ordered(">", args[1], zero), args[0], zero)

    return F32x16(F32x16, F32x16), codegen


@intrinsic
def iota(_, first):
    """``first, first + 1, ...`` as float32 (exact below 2**24)."""

    def codegen(_context, builder, _signature, args):
        start = splat_value(builder, builder.trunc(args[0], I32), I32V)
        return builder.sitofp(builder.add(start, const_vector(I32V, range(LANES))), F32V)

    return F32x16(types.int64), codegen


def _reduction(combine):
    @intrinsic
    def reduce(_, value):
        def codegen(_context, builder, _signature, args):
            vector, undefined = args[0], ir.Constant(F32V, ir.Undefined)
            half = LANES // 2
            while half:  # a fixed tree: the same bits on every CPU
                lanes = [(i + half) % LANES for i in range(LANES)]
                mask = ir.Constant(ir.VectorType(I32, LANES), lanes)
                vector = combine(builder, vector, builder.shuffle_vector(vector, undefined, mask))
                half //= 2
            return builder.extract_element(vector, I32(0))

        return types.float32(F32x16), codegen

    return reduce


#: sum of the lanes, as a fixed tree
hsum = _reduction(lambda builder, a, b: builder.fadd(a, b))
#: largest lane
hmax = _reduction(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@intrinsic
def _round(_, value):
    return F32x16(F32x16), lambda _c, b, _s, a: call_llvm(b, "llvm.nearbyint.v16f32", F32V, [a[0]])


@intrinsic
def _power_of_two(_, exponent):
    """2**n for integral float lanes in [-126, 127]; 0 for -127."""

    def codegen(_context, builder, _signature, args):
        whole = builder.fptosi(args[0], I32V)
        biased = builder.add(whole, const_vector(I32V, [127] * LANES))
        return builder.bitcast(builder.shl(biased, const_vector(I32V, [23] * LANES)), F32V)

    return F32x16(F32x16), codegen


@inner
def exp2(x):
    """2**x per lane, relative error < 4e-7 for x in [-126.5, 127]; below that (also -inf) exactly
    0.

    Degree-5 minimax polynomial on the fraction in [-1/2, 1/2]; an exponent of -127 is the bit
    pattern of 0.
    """
    bounded = vmax(x, splat(types.float32(-127.0)))
    whole = _round(bounded)
    f = bounded - whole
    p = splat(types.float32(1.3276470116903233e-3))
    p = fma(p, f, splat(types.float32(9.675541319489738e-3)))
    p = fma(p, f, splat(types.float32(5.550713279299946e-2)))
    p = fma(p, f, splat(types.float32(2.4022119724212546e-1)))
    p = fma(p, f, splat(types.float32(6.931469670612078e-1)))
    p = fma(p, f, splat(types.float32(1.0)))
    return p * _power_of_two(whole)


# 1.5 * 2**23: adding it leaves the nearest integer in the low bits of a float32
_MAGIC = 12582912.0


@intrinsic
def _bits(_, value):
    return I32x16(F32x16), lambda _c, b, _s, a: b.bitcast(a[0], I32V)


@inner
def round_scaled(x, scale):
    """x * scale rounded to the nearest integer, |result| < 2**21: (as float32, with its low 16 bits
    in an int32 lane).

    One fma and one subtraction instead of a conversion each way.
    """
    shifted = fma(x, splat(scale), splat(types.float32(_MAGIC)))
    return shifted - splat(types.float32(_MAGIC)), _bits(shifted)
