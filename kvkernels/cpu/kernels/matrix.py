"""Rows times a float matrix, for exact rows: ``out[r, o] = sum_k act[r, k] * m[k, o]``.

The same shape as ``dot.py`` with elements of ``KINDS`` in place of codes; the matrix lies with
outputs contiguous, so exact K is kept transposed ([D, tokens]) and exact V as it is ([tokens, D]).
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvkernels.cpu.kernels.address import call_address
from kvkernels.cpu.kernels.jit import callback
from kvkernels.cpu.kernels.simd import (
    F32,
    F32V,
    I32V,
    LANES,
    const_vector,
    fma_value,
    load_value,
    splat_value,
)

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
#: what the elements of the matrix may be
KINDS = ("float32", "fp16", "bf16")
_SIGNATURE = types.void(
    types.CPointer(types.uint8),
    types.CPointer(types.float32),
    types.CPointer(types.float32),
    *(types.int64,) * 5,
)


def _elements(builder, pointer, element):
    """16 elements of one of ``KINDS`` as float32."""
    if element == "float32":
        return load_value(builder, pointer, F32V, 4)
    if element == "fp16":
        return builder.fpext(load_value(builder, pointer, _HALVES, 2), F32V)
    wide = builder.zext(load_value(builder, pointer, _SHORTS, 2), I32V)  # upper half of a float32
    return builder.bitcast(builder.shl(wide, const_vector(I32V, [16] * LANES)), F32V)


@intrinsic(prefer_literal=True)
def _rows_times(_, m, act, out, n_out, n_red, m_stride, act_stride, out_stride, rows, kind):
    if not isinstance(rows, types.Literal) or not isinstance(kind, types.Literal):
        return None
    n_rows, element = rows.literal_value, KINDS[kind.literal_value]
    size = 4 if element == "float32" else 2
    # Several blocks of 16 outputs side by side: whole cache lines, and enough independent sums.
    blocks = 2 if n_rows >= 4 else 4

    def codegen(_context, builder, _signature, args):
        m, act, out, n_out, n_red, m_stride, act_stride, out_stride = args[:8]
        zero = ir.Constant(F32V, [0.0] * LANES)
        sums = [
            [cgutils.alloca_once_value(builder, zero) for _ in range(n_rows)] for _ in range(blocks)
        ]
        acts = [builder.gep(act, [builder.mul(act_stride, _I64(r))]) for r in range(n_rows)]
        line_bytes = builder.mul(m_stride, _I64(size))

        def sweep(start, count, sums):
            """``count`` steps of ``len(sums)`` blocks of outputs from output ``start`` on."""
            with cgutils.for_range(builder, count) as outer:
                at = builder.add(start, builder.mul(outer.index, _I64(LANES * len(sums))))
                column = builder.gep(m, [builder.mul(at, _I64(size))])
                for slot in (s for block in sums for s in block):
                    builder.store(zero, slot)
                with cgutils.for_range(builder, n_red) as inner:
                    pointer = builder.gep(column, [builder.mul(inner.index, line_bytes)])
                    scalars = [
                        splat_value(builder, builder.load(builder.gep(row, [inner.index])), F32V)
                        for row in acts
                    ]
                    for j, block in enumerate(sums):
                        part = builder.gep(pointer, [_I64(LANES * size * j)])
                        value = _elements(builder, part, element)
                        for slot, scalar in zip(block, scalars, strict=True):
                            total = fma_value(builder, value, scalar, builder.load(slot))
                            builder.store(total, slot)
                for j, block in enumerate(sums):
                    for r, slot in enumerate(block):
                        index = builder.add(at, builder.mul(out_stride, _I64(r)))
                        target = builder.gep(out, [builder.add(index, _I64(LANES * j))])
                        target = builder.bitcast(target, F32V.as_pointer())
                        builder.store(builder.load(slot), target).align = 4

        steps = builder.sdiv(n_out, _I64(LANES * blocks))
        sweep(_I64(0), steps, sums)
        if blocks > 2:
            done = builder.mul(steps, _I64(LANES * blocks))
            sweep(done, builder.sdiv(builder.sub(n_out, done), _I64(LANES * 2)), sums[:2])
        return _context.get_dummy_value()

    return types.void(m, act, out, *(types.int64,) * 5, rows, kind), codegen


def matrix_kernel(rows, kind):
    """The compiled micro-kernel for that many rows; ``kind``: index of the elements in ``KINDS``.

    C signature: ``void(const void *m, const float *act, float *out, int64 n_out, int64 n_red, int64
    m_stride, int64 act_stride, int64 out_stride)``; n_out a multiple of 32, strides in elements.
    """

    @callback(_SIGNATURE)
    def rows_times(m, act, out, n_out, n_red, m_stride, act_stride, out_stride):
        _rows_times(m, act, out, n_out, n_red, m_stride, act_stride, out_stride, rows, kind)

    return rows_times


@intrinsic
def call_matrix(
    _, address, m, m_at, act, act_at, out, out_at, n_out, n_red, m_stride, act_stride, out_stride
):
    """Call a micro-kernel of :func:`matrix_kernel`;
    ``*_at`` are offsets in elements of each array.
    """

    def codegen(context, builder, sig, args):
        call_address(context, builder, sig, args, (_I8, F32, F32))
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, m, i64, act, i64, out, i64, *(i64,) * 5), codegen
