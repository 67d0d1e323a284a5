"""Numba kernels that seal stage rows into records: the ``published`` encoder (codec.md 4, 5, 8).

Equal to ``kvkernels.cpu.reference`` byte for byte: no fast maths, no reassociation, no contraction
to FMA. Status codes instead of exceptions, because these run without the GIL: 0 sealed; otherwise
1 + the index of the first head whose values cannot be stored in fp16 axes (its record is garbage).
"""

import math

import numpy as np

from kvkernels.cpu.kernels.half import float_to_half, half_to_float
from kvkernels.cpu.kernels.jit import exact_inner, exact_kernel
from kvkernels.cpu.kernels.lines import pack_lines

_GROUP = 128
_ITERATIONS = 16

_STD_MIN, _STD_MAX = np.float32(1e-3), np.float32(1e3)
_LOG_MIN, _LOG_MAX = np.float32(-0.3), np.float32(10.0)
_STD_FLOOR, _STEP_MIN = np.float32(1e-8), np.float32(1e-10)
_ZERO, _HALF, _ONE, _TWO = np.float32(0.0), np.float32(0.5), np.float32(1.0), np.float32(2.0)
_BIG = np.float32(3.0e38)


@exact_inner
def _line_std(x, e_row, e_col, std, sums):
    """std fp32 [m] of every column of x / (e_row * e_col), x fp32 [n, m]; one sweep, n % 4 == 0.

    Deviations from the first row, float64 sums row after row: see ``reference._column_std``.
    """
    n, m = x.shape
    first, s1, s2 = sums[0], sums[1], sums[2]
    x0, e0 = x[0], e_row[0]
    for j in range(m):
        first[j] = np.float64(x0[j] / (e0 * e_col[j]))
        s1[j] = 0.0
        s2[j] = 0.0
    for i in range(0, n, 4):  # four rows a turn: the sums stay in registers, in row order
        x0, x1, x2, x3 = x[i], x[i + 1], x[i + 2], x[i + 3]
        e0, e1, e2, e3 = e_row[i], e_row[i + 1], e_row[i + 2], e_row[i + 3]
        for j in range(m):
            d0 = np.float64(x0[j] / (e0 * e_col[j])) - first[j]
            d1 = np.float64(x1[j] / (e1 * e_col[j])) - first[j]
            d2 = np.float64(x2[j] / (e2 * e_col[j])) - first[j]
            d3 = np.float64(x3[j] / (e3 * e_col[j])) - first[j]
            s1[j] = (((s1[j] + d0) + d1) + d2) + d3
            s2[j] = (((s2[j] + d0 * d0) + d1 * d1) + d2 * d2) + d3 * d3
    for j in range(m):
        var = (s2[j] - s1[j] * s1[j] / n) / (n - 1)
        std[j] = np.float32(math.sqrt(max(var, 0.0)))


@exact_inner
def _log_step(log, std, e):
    """One clamped update of log scales (fp32, in place) and their exponentials ``e``."""
    for i in range(log.shape[0]):
        s = min(max(std[i], _STD_MIN), _STD_MAX)
        v = log[i] + np.float32(math.log(np.float64(s)))
        log[i] = min(max(v, _LOG_MIN), _LOG_MAX)
        e[i] = np.float32(math.exp(np.float64(log[i])))


@exact_inner
def _spread(std):
    lo, hi = std[0], std[0]
    for i in range(1, std.shape[0]):
        lo, hi = min(lo, std[i]), max(hi, std[i])
    return hi / max(lo, _STD_FLOOR)


@exact_inner
def _normalise(x, xt, bc, br):
    """Best scales bc fp32 [C], br fp32 [R] of tile ``x [R, C]`` (``xt`` its transpose)."""
    rows, cols = x.shape
    lc, lr = np.zeros(cols, np.float32), np.zeros(rows, np.float32)
    ec, er = np.ones(cols, np.float32), np.ones(rows, np.float32)
    col_std, row_std = np.empty(cols, np.float32), np.empty(rows, np.float32)
    sums = np.empty((3, _GROUP), np.float64)
    best = _ONE
    for it in range(_ITERATIONS + 1):
        if it > 0:  # iterate 0 is the identity, which can win
            _log_step(lc, col_std, ec)
            _line_std(xt, ec, er, row_std, sums)
            _log_step(lr, row_std, er)
        _line_std(x, er, ec, col_std, sums)
        _line_std(xt, ec, er, row_std, sums)
        imb = _spread(col_std) + _spread(row_std)
        if it == 0 or imb <= best:
            best = imb
            for c in range(cols):
                bc[c] = ec[c]
            for r in range(rows):
                br[r] = er[r]


@exact_inner
def _quantise(x, bc, br, bits, codes, scale, zero):
    """codes uint8 [R, C] and fp32 axes ``scale``, ``zero`` [R] of tile ``x [R, C]``."""
    rows, cols = x.shape
    qmax = np.float32((1 << bits) - 1)
    b = np.empty(cols, np.float32)
    for r in range(rows):
        row, out, e = x[r], codes[r], br[r]
        lo, hi = _BIG, -_BIG
        for c in range(cols):
            b[c] = row[c] / (bc[c] * e)
        for c in range(cols):
            lo, hi = min(lo, b[c]), max(hi, b[c])
        step = max((hi - lo) / qmax, _STEP_MIN)
        for c in range(cols):
            v = (b[c] - lo) / step
            whole = math.floor(v)
            # Half away from zero, exactly: floor(v + 0.5) would round 0.49999997 up.
            whole += _ONE if v - whole >= _HALF else _ZERO
            out[c] = np.uint8(min(max(whole, _ZERO), qmax))
        scale[r], zero[r] = e * step, e * lo


@exact_inner
def _write_axes(scale, zero, other, out):
    """Three fp32 axes -> fp16 bits ``out`` [2 R + C]; False when one is not finite (codec.md 8)."""
    rows = scale.shape[0]
    shift, unshift = _ONE, _ONE
    for r in range(rows):
        if (float_to_half(zero[r]) & 0x7C00) == 0x7C00:
            shift, unshift = _HALF, _TWO  # one halving always suffices: see reference._half_axes
    for r in range(rows):
        out[r] = float_to_half(scale[r] * shift)
        bits = float_to_half(zero[r] * shift)
        out[rows + r] = np.uint16(0) if bits == 0x8000 else bits  # -0 is written as +0
    for c in range(other.shape[0]):
        out[2 * rows + c] = float_to_half(other[c] * unshift)
    bad = 0
    for i in range(out.shape[0]):
        bad += (out[i] & 0x7C00) == 0x7C00
    return bad == 0


@exact_kernel
def seal_head(tile, is_value, bits, out):
    """Stage rows of one KV head, uint16 ``tile [128, D]`` -> line records uint8 ``out [nbytes]``.

    The ``published`` encoder over every slice. Returns 0, or 1 when a value or an axis is not
    finite in fp16: then ``out`` is not a record.
    """
    d = tile.shape[1]
    width = min(d, 128)
    rows, cols = (_GROUP, width) if is_value else (width, _GROUP)
    a, b = np.empty((_GROUP, width), np.float32), np.empty((width, _GROUP), np.float32)
    x, xt = (a, b) if is_value else (b, a)
    codes = np.empty((rows, cols), np.uint8)
    bc, br = np.empty(cols, np.float32), np.empty(rows, np.float32)
    scale, zero = np.empty(rows, np.float32), np.empty(rows, np.float32)
    code_bytes = rows * cols * bits // 8
    nbytes = code_bytes + 4 * rows + 2 * cols
    for s in range(d // width):
        bad = 0
        for t in range(_GROUP):
            row = tile[t, s * width : (s + 1) * width]
            for c in range(width):
                bad += (row[c] & 0x7C00) == 0x7C00
                a[t, c] = half_to_float(row[c])
        if bad:
            return 1
        for c in range(width):
            for t in range(_GROUP):
                b[c, t] = a[t, c]
        _normalise(x, xt, bc, br)
        _quantise(x, bc, br, bits, codes, scale, zero)
        record = out[s * nbytes : (s + 1) * nbytes]
        pack_lines(codes, bits, record[:code_bytes].view(np.uint32))
        if not _write_axes(scale, zero, bc, record[code_bytes:].view(np.uint16)):
            return 1
    return 0


@exact_kernel
def seal_groups(stage, is_value, bits, out):
    """uint16 ``stage [n, 128, D]`` -> line records uint8 ``out [n, nbytes]``, head after head.

    Threads take slices of both arrays. Returns 0, or 1 + the first index that could not be sealed.
    """
    for i in range(stage.shape[0]):
        if seal_head(stage[i], is_value, bits, out[i]) != 0:
            return 1 + i
    return 0
