"""Numba kernels that seal stage rows into records: the ``published`` encoder (codec.md 4, 5, 8).

Equal to ``kvkernels.cpu.reference`` byte for byte: no fast maths, no reassociation, no contraction
to FMA. Status codes instead of exceptions, because these run without the GIL: 0 sealed, 1 a value
or an axis is not finite in fp16 (the record is garbage then).
"""

import numpy as np

from kvkernels.cpu.kernels.balance import BC, BR, LINE, SCALE, ZERO, normalise
from kvkernels.cpu.kernels.half import float_to_half
from kvkernels.cpu.kernels.jit import exact_inner, exact_kernel
from kvkernels.cpu.kernels.lines import pack_lines
from kvkernels.cpu.kernels.simd import hmax, load, load_half, splat, store, vmax, vmin
from kvkernels.cpu.kernels.wide import differ, half_away, store_whole

_GROUP = 128
_STEP_MIN = np.float32(1e-10)
_ZERO, _HALF, _ONE, _TWO = np.float32(0.0), np.float32(0.5), np.float32(1.0), np.float32(2.0)


@exact_inner
def read_slice(tile, is_value, index, width, w):
    """Slice ``index`` of a staged head as the fp32 tile ``w``; False where a value is not finite.

    ``tile`` uint16: K ``[D * 128]`` by channel, V ``[128 * D]`` by token: as the quantiser sees it.
    """
    rows, cols = (_GROUP, width) if is_value else (width, _GROUP)
    stride = tile.shape[0] // _GROUP if is_value else _GROUP
    start = index * width if is_value else index * width * _GROUP
    zero = splat(_ZERO)
    bad = 0
    for r in range(rows):
        for c in range(0, cols, 16):
            v = load_half(tile, start + r * stride + c)
            bad |= differ(v - v, zero)
            store(w, r * cols + c, v)
    return bad == 0


@exact_inner
def quantise(w, rows, cols, bits, codes):
    """codes uint8 ``[rows * cols]`` and fp32 axes at ``w[SCALE:]``, ``w[ZERO:]`` of a tile."""
    qmax = np.float32((1 << bits) - 1)
    for r in range(rows):
        at = r * cols
        e = splat(w[BR + r])
        low = high = load(w, at) / (load(w, BC) * e)
        for c in range(0, cols, 16):
            v = load(w, at + c) / (load(w, BC + c) * e)
            low, high = vmin(v, low), vmax(v, high)
            store(w, LINE + c, v)
        lo, hi = -hmax(splat(_ZERO) - low), hmax(high)
        step = max((hi - lo) / qmax, _STEP_MIN)
        for c in range(0, cols, 16):
            v = half_away((load(w, LINE + c) - splat(lo)) / splat(step))
            store_whole(codes, at + c, vmin(v, splat(qmax)))
        w[SCALE + r], w[ZERO + r] = w[BR + r] * step, w[BR + r] * lo


@exact_inner
def write_axes(w, rows, cols, out, at):
    """fp16 axes of ``w`` as bytes ``out[at:]``; False when one is not finite (codec.md 8)."""
    shift, unshift = _ONE, _ONE
    for r in range(rows):
        if (float_to_half(w[ZERO + r]) & 0x7C00) == 0x7C00:
            shift, unshift = _HALF, _TWO  # one halving always suffices: see reference._half_axes
    bad = 0
    for i in range(2 * rows + cols):
        if i < rows:
            bits = float_to_half(w[SCALE + i] * shift)
        elif i < 2 * rows:
            bits = float_to_half(w[ZERO + i - rows] * shift)
            bits = np.uint16(0) if bits == 0x8000 else bits  # -0 is written as +0
        else:
            bits = float_to_half(w[BC + i - 2 * rows] * unshift)
        bad += (bits & 0x7C00) == 0x7C00
        out[at + 2 * i], out[at + 2 * i + 1] = np.uint8(bits & 255), np.uint8(bits >> 8)
    return bad == 0


@exact_kernel
def seal_head(tile, is_value, bits, w, d, codes, out):
    """One staged KV head, uint16 ``tile``: K ``[D * 128]`` by channel, V ``[128 * D]`` by token
    -> line records uint8 ``out [nbytes]``.

    The ``published`` encoder over every slice; ``w, d, codes`` are ``columns.seal_workspace``.
    Returns 0, or 1 when a value or an axis is not finite in fp16: then ``out`` is not a record.
    """
    dim = tile.shape[0] // _GROUP
    width = min(dim, 128)
    rows, cols = (_GROUP, width) if is_value else (width, _GROUP)
    code_bytes = rows * cols * bits // 8
    at = np.int64(0)
    for s in range(dim // width):
        if not read_slice(tile, is_value, s, width, w):
            return 1
        normalise(w, d, rows, cols)
        quantise(w, rows, cols, bits, codes)
        pack_lines(codes, rows, cols, bits, out, at)
        at += code_bytes
        if not write_axes(w, rows, cols, out, at):
            return 1
        at += 4 * rows + 2 * cols
    return 0
