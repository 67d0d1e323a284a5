"""The micro-kernel: integer codes of a ``line`` tile times float32 activations.

``out[r, o] = sum_k act[r, k] * code[o, k]`` for the 16-output, 4-reduction lines of codec.md 5b.
One kernel serves QK^T (outputs = tokens, reductions = channels) and PV (outputs = channels,
reductions = tokens). Codes are unpacked once and used for all ``rows``. Scales never appear here:
they are folded into ``act`` and ``out`` (codec.md 6).

A kernel exists per (bits, rows) and is compiled when first asked for; attention calls it through
its address, so that one compiled attention serves every pair of widths.
"""

from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

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

#: rows that one pass can serve; a pass of n rows is cut into these
ROW_BLOCKS = (4, 2, 1)

# (bits of the main block, bits of the extra block) of a line tile
_PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}
_LINE_BYTES = 64
_RED = 32  # reductions of one block

_I64 = ir.IntType(64)
_SIGNATURE = types.void(
    types.CPointer(types.uint8),
    types.CPointer(types.float32),
    types.CPointer(types.float32),
    types.int64,
    types.int64,
    types.int64,
    types.int64,
)


def _codes(builder, words, bits):
    """Yield (reduction, vector of that reduction's codes for 16 outputs) over one block of 32
    reductions.
    """
    main, extra = _PLANES[bits]
    steps = main  # 32 reductions x 16 outputs x main bits = main lines
    planes = 8 // main

    def field(word, shift, width):
        if shift:
            word = builder.lshr(word, const_vector(I32V, [shift] * LANES))
        return builder.and_(word, const_vector(I32V, [(1 << width) - 1] * LANES))

    for quad in range(_RED // 4):
        step, plane = quad % steps, quad // steps
        assert plane < planes
        for i in range(4):
            code = field(words[step], 8 * i + plane * main, main)
            if extra:
                word = words[steps + quad % extra]
                high = field(word, 8 * i + (quad // extra) * extra, extra)
                code = builder.or_(code, builder.shl(high, const_vector(I32V, [main] * LANES)))
            yield 4 * quad + i, code


@intrinsic(prefer_literal=True)
def _dot_lines(_, codes, act, out, n_out, n_red, act_stride, out_stride, bits, rows):
    if not isinstance(bits, types.IntegerLiteral) or not isinstance(rows, types.IntegerLiteral):
        return None
    width, n_rows = bits.literal_value, rows.literal_value
    # Few rows leave the fma units waiting on one chain of additions, so several blocks of 16
    # outputs run side by side; the order of additions inside an output never changes.
    blocks = max(1, 4 // n_rows)

    def codegen(_context, builder, _signature, args):
        codes, act, out, n_out, n_red, act_stride, out_stride = args[:7]
        block_bytes = _LINE_BYTES * width  # 16 outputs x 32 reductions
        n_blocks = builder.sdiv(n_red, _I64(_RED))
        row_bytes = builder.mul(n_blocks, _I64(block_bytes))
        act_rows = [builder.gep(act, [builder.mul(act_stride, _I64(r))]) for r in range(n_rows)]
        zero = ir.Constant(F32V, [0.0] * LANES)
        sums = [
            [cgutils.alloca_once_value(builder, zero) for _ in range(n_rows)] for _ in range(blocks)
        ]
        step_out = LANES * blocks
        with cgutils.for_range(builder, builder.sdiv(n_out, _I64(step_out))) as outer:
            for lane in (s for block in sums for s in block):
                builder.store(zero, lane)
            first = builder.mul(outer.index, _I64(blocks))
            bases = [
                builder.gep(codes, [builder.mul(builder.add(first, _I64(j)), row_bytes)])
                for j in range(blocks)
            ]
            with cgutils.for_range(builder, n_blocks) as inner:
                offset = builder.mul(inner.index, _I64(block_bytes))
                words = [
                    [
                        load_value(
                            builder,
                            builder.gep(base, [builder.add(offset, _I64(_LINE_BYTES * s))]),
                            I32V,
                            4,
                        )
                        for s in range(width)
                    ]
                    for base in bases
                ]
                red = builder.mul(inner.index, _I64(_RED))
                pointers = [builder.gep(row, [red]) for row in act_rows]
                streams = [_codes(builder, w, width) for w in words]
                for parts in zip(*streams, strict=True):
                    k = parts[0][0]
                    scalars = [
                        splat_value(builder, builder.load(builder.gep(p, [_I64(k)])), F32V)
                        for p in pointers
                    ]
                    for block, (_k, code) in zip(sums, parts, strict=True):
                        value = builder.sitofp(code, F32V)
                        for lane, scalar in zip(block, scalars, strict=True):
                            total = fma_value(builder, value, scalar, builder.load(lane))
                            builder.store(total, lane)
            at = builder.mul(outer.index, _I64(step_out))
            for j, block in enumerate(sums):
                for r, lane in enumerate(block):
                    index = builder.add(at, builder.mul(out_stride, _I64(r)))
                    target = builder.gep(out, [builder.add(index, _I64(LANES * j))])
                    stored = builder.store(
                        builder.load(lane), builder.bitcast(target, F32V.as_pointer())
                    )
                    stored.align = 4
        return _context.get_dummy_value()

    ints = (types.int64,) * 4
    return types.void(codes, act, out, *ints, bits, rows), codegen


@cache
def dot_address(bits, rows):
    """Address of the compiled micro-kernel for this width and row count (compiled on the first
    call).

    C signature: ``void(const uint8 *codes, const float *act, float *out, int64 n_out, int64 n_red,
    int64 act_stride, int64 out_stride)``; strides in elements; n_out a multiple of 64, n_red of 32.
    """

    @callback(_SIGNATURE)
    def dot(codes, act, out, n_out, n_red, act_stride, out_stride):
        _dot_lines(codes, act, out, n_out, n_red, act_stride, out_stride, bits, rows)

    _keep_alive.append(dot)
    return dot.address


_keep_alive = []  # type: ignore[var-annotated]


@intrinsic
def call_dot(
    _, address, codes, codes_at, act, act_at, out, out_at, n_out, n_red, act_stride, out_stride
):
    """Call a micro-kernel of :func:`dot_address` on ``codes[codes_at:]``, ``act[act_at:]``,
    ``out[out_at:]``.
    """

    def codegen(context, builder, sig, args):
        def pointer(position):
            array = context.make_array(sig.args[position])(context, builder, args[position])
            return builder.gep(array.data, [args[position + 1]])

        kind = ir.FunctionType(
            ir.VoidType(),
            [ir.IntType(8).as_pointer(), F32.as_pointer(), F32.as_pointer()] + [_I64] * 4,
        )
        function = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(function, [pointer(1), pointer(3), pointer(5), *args[7:]])
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, codes, i64, act, i64, out, i64, i64, i64, i64, i64), codegen
