"""The micro-kernel: integer codes of a ``line`` tile times activations.

``out[r, o] = sum_k act[r, k] * code[o, k]`` for the 16-output, 4-reduction lines of codec.md 5b.
One kernel serves QK^T (outputs = tokens, reductions = channels) and PV (outputs = channels,
reductions = tokens). Codes are unpacked once and used for all ``rows``. The record's scales never
appear here: they are folded into ``act`` and ``out`` (codec.md 6). Activations come in one of three
forms (codec.md 5c, made by ``quantise.py``):

=====  ==========================================  =======================================
mode   bytes of one row of n_red activations       scales of one row
=====  ==========================================  =======================================
f32    4 n_red: float32                            none
i8     n_red: int8                                 n_red / 32: one per 32 activations
i16    2 n_red: high bytes, then low bytes         1; activation = scale * (256 high + low)
=====  ==========================================  =======================================

A kernel exists per (bits, rows, mode, instruction set), compiled when first asked for and called
through its address, so that one compiled attention serves every pair of widths.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvkernels.cpu.kernels.address import call_address
from kvkernels.cpu.kernels.isa import EMITTERS
from kvkernels.cpu.kernels.jit import callback
from kvkernels.cpu.kernels.simd import (
    F32,
    F32V,
    I32,
    I32V,
    LANES,
    const_vector,
    fma_value,
    load_value,
    prefetch_value,
    splat_value,
)

MODES = ("f32", "i8", "i16")

# (bits of the main block, bits of the extra block) of a line tile
_PLANES = {2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}
_LINE_BYTES = 64
_RED = 32  # reductions of one block
_QUADS = _RED // 4

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_POINTERS = (types.CPointer(types.uint8), types.CPointer(types.uint8))
_FLOATS = (types.CPointer(types.float32), types.CPointer(types.float32))
_SIGNATURE = types.void(*_POINTERS, *_FLOATS, types.int64, types.int64, types.int64)


def _bytes(pattern):
    """An I32V whose every byte is ``pattern``."""
    return const_vector(I32V, [pattern * 0x01010101] * LANES)


def _shifted(builder, word, left):
    if left > 0:
        return builder.shl(word, const_vector(I32V, [left] * LANES))
    if left < 0:
        return builder.lshr(word, const_vector(I32V, [-left] * LANES))
    return word


def _quad_codes(builder, words, bits, quad):
    """Codes of reductions 4 quad .. 4 quad + 3 for 16 outputs: one byte each, as an I32V."""
    main, extra = _PLANES[bits]
    if main == 8:
        return words[quad]
    step, plane = quad % main, quad // main
    word = builder.and_(_shifted(builder, words[step], -plane * main), _bytes((1 << main) - 1))
    if extra:
        high = words[main + quad % extra]
        move = main - (quad // extra) * extra
        mask = _bytes(((1 << extra) - 1) << main)
        word = builder.or_(word, builder.and_(_shifted(builder, high, move), mask))
    return word


def _pieces(builder, codes, bits, emitter):
    """Codes as (bytes an instruction can take, their width, weight)."""
    if bits < 8 or emitter.wide_codes:
        return [(codes, bits, 0)]
    low = builder.and_(codes, _bytes(15))
    high = builder.and_(_shifted(builder, codes, -4), _bytes(15))
    return [(low, 4, 0), (high, 4, 4)]


class _Float:
    """Activations in float32: a product per code."""

    halves, row_bytes = 1, 4
    totals = False

    def block(self, builder, words, bits, acts, rows, sums, **_):
        for quad in range(_QUADS):
            codes = _quad_codes(builder, words, bits, quad)
            for i in range(4):
                byte = builder.and_(
                    _shifted(builder, codes, -8 * i), const_vector(I32V, [255] * LANES)
                )
                value = builder.sitofp(byte, F32V)
                for r in range(rows):
                    at = builder.gep(acts[r], [_I64(4 * (4 * quad + i))])
                    scalar = builder.load(builder.bitcast(at, F32.as_pointer()))
                    scalar = splat_value(builder, scalar, F32V)
                    total = fma_value(builder, value, scalar, builder.load(sums[r]))
                    builder.store(total, sums[r])


class _Int8:
    """Activations in int8: exact sums over 32, then one scale."""

    halves, row_bytes = 1, 1
    totals = False

    def block(self, builder, words, bits, acts, rows, sums, emitter, scales, **_):
        exact = _sums(builder, words, bits, [[a] for a in acts], emitter)
        for r in range(rows):
            scale = splat_value(builder, builder.load(scales[r]), F32V)
            value = builder.sitofp(exact[r][0], F32V)
            builder.store(fma_value(builder, value, scale, builder.load(sums[r])), sums[r])


class _Int16:
    """Activations in int16 as two int8 products; exact over the whole row, then one scale."""

    halves, row_bytes = 2, 2
    totals = True

    def block(self, builder, words, bits, acts, rows, sums, emitter, n_red, **_):
        both = [[a, builder.gep(a, [n_red])] for a in acts]
        exact = _sums(builder, words, bits, both, emitter)
        for r in range(rows):
            high = builder.shl(exact[r][0], const_vector(I32V, [8] * LANES))
            total = builder.add(high, exact[r][1])
            builder.store(builder.add(builder.load(sums[r]), total), sums[r])


def _sums(builder, words, bits, acts, emitter):
    """Exact int32 sums over one block of 32 reductions, for every row and half:
    ``[row][half]`` I32V.
    """
    open_sums = {}
    done = {}

    def close(key, weight):
        if key in open_sums:
            total = _shifted(builder, emitter.finish(builder, open_sums.pop(key)), weight)
            at = key[:2]
            done[at] = builder.add(done[at], total) if at in done else total

    for quad in range(_QUADS):
        codes = _quad_codes(builder, words, bits, quad)
        for piece, (value, width, weight) in enumerate(_pieces(builder, codes, bits, emitter)):
            for r, row in enumerate(acts):
                for half, pointer in enumerate(row):
                    key = (r, half, piece)
                    at = builder.gep(pointer, [_I64(4 * quad)])
                    act = load_value(builder, at, I32, 1)
                    running = open_sums.get(key)
                    running = emitter.zero() if running is None else running
                    open_sums[key] = emitter.add(builder, running, value, act)
                    if (quad + 1) % emitter.adds(width) == 0 or quad == _QUADS - 1:
                        close(key, weight)
    return [[done[r, half] for half in range(len(row))] for r, row in enumerate(acts)]


_MODES = {"f32": _Float(), "i8": _Int8(), "i16": _Int16()}


@intrinsic(prefer_literal=True)
def _dot_lines(_, codes, act, scales, out, n_out, n_red, ahead, bits, rows, mode, isa):
    literals = (bits, rows, mode, isa)
    if not all(isinstance(x, types.Literal) for x in literals):
        return None
    width, n_rows, mode_name, isa_name = (x.literal_value for x in literals)
    form, emitter = _MODES[mode_name], EMITTERS[isa_name]
    # Few rows leave the arithmetic units waiting on one chain of additions, so two blocks of 16
    # outputs run side by side (four would be no faster, and a block of a standard type has only
    # two); the order of additions inside an output never changes.
    blocks = 1 if n_rows > 2 else 2

    def codegen(_context, builder, _signature, args):
        codes, act, scales, out, n_out, n_red, ahead = args[:7]
        n_blocks = builder.sdiv(n_red, _I64(_RED))
        out_bytes = builder.mul(n_blocks, _I64(_LINE_BYTES * width))
        stride = builder.mul(n_red, _I64(form.row_bytes))
        act_rows = [builder.gep(act, [builder.mul(stride, _I64(r))]) for r in range(n_rows)]
        kind = I32V if form.totals else F32V
        zero = ir.Constant(kind, [0] * LANES)
        sums = [
            [cgutils.alloca_once_value(builder, zero) for _ in range(n_rows)] for _ in range(blocks)
        ]
        step = LANES * blocks
        with cgutils.for_range(builder, builder.sdiv(n_out, _I64(step))) as outer:
            for slot in (s for block in sums for s in block):
                builder.store(zero, slot)
            first = builder.mul(outer.index, _I64(blocks))
            bases = [
                builder.gep(codes, [builder.mul(builder.add(first, _I64(j)), out_bytes)])
                for j in range(blocks)
            ]
            with cgutils.for_range(builder, n_blocks) as inner:
                at = builder.mul(inner.index, _I64(_LINE_BYTES * width))
                red = builder.mul(inner.index, _I64(_RED * form.row_bytes // form.halves))
                acts = [builder.gep(row, [red]) for row in act_rows]
                block_scales = None
                if mode_name == "i8":
                    block_scales = [
                        builder.gep(
                            scales,
                            [builder.add(builder.mul(n_blocks, _I64(r)), inner.index)],
                        )
                        for r in range(n_rows)
                    ]
                for base, block in zip(bases, sums, strict=True):
                    for s in range(width):
                        line = builder.add(builder.add(at, ahead), _I64(_LINE_BYTES * s))
                        prefetch_value(builder, builder.gep(base, [line]))
                    words = [
                        load_value(
                            builder,
                            builder.gep(base, [builder.add(at, _I64(_LINE_BYTES * s))]),
                            I32V,
                            4,
                        )
                        for s in range(width)
                    ]
                    form.block(
                        builder, words, width, acts, n_rows, block,
                        emitter=emitter, scales=block_scales, n_red=n_red,
                    )  # fmt: skip
            at = builder.mul(outer.index, _I64(step))
            for j, block in enumerate(sums):
                for r, slot in enumerate(block):
                    value = builder.load(slot)
                    if form.totals:
                        scale = builder.load(builder.gep(scales, [_I64(r)]))
                        value = builder.fmul(
                            builder.sitofp(value, F32V), splat_value(builder, scale, F32V)
                        )
                    index = builder.add(at, builder.mul(n_out, _I64(r)))
                    target = builder.gep(out, [builder.add(index, _I64(LANES * j))])
                    builder.store(value, builder.bitcast(target, F32V.as_pointer())).align = 4
        return _context.get_dummy_value()

    return types.void(codes, act, scales, out, *(types.int64,) * 3, *literals), codegen


def dot_kernel(bits, rows, mode, isa):
    """The compiled micro-kernel (cached on disk).

    C signature: ``void(const uint8 *codes, const uint8 *act, const float *scales, float *out, int64
    n_out, int64 n_red)``; n_out and n_red multiples of 32; rows of act, scales and out are
    contiguous.
    """

    @callback(_SIGNATURE)
    def dot(codes, act, scales, out, n_out, n_red, ahead):
        _dot_lines(codes, act, scales, out, n_out, n_red, ahead, bits, rows, mode, isa)

    return dot


@intrinsic
def call_dot(
    _, address, codes, codes_at, act, act_at, scales, scales_at, out, out_at, n_out, n_red, ahead
):
    """Call a micro-kernel of :func:`dot_kernel`;
    ``*_at`` are offsets in elements of each array.
    """

    def codegen(context, builder, sig, args):
        call_address(context, builder, sig, args, (_I8, _I8, F32, F32))
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, codes, i64, act, i64, scales, i64, out, i64, i64, i64, i64), codegen
