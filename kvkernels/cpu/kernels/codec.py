"""Numba kernels of the codec: rotation, sealing, decoding (codec.md 2, 4, 5, 5b).

Everything here is deterministic and equal, bit for bit, to ``kvkernels.cpu.reference``: no fast
maths, no reassociation, no contraction to FMA. Arrays are C-contiguous; fp16 travels as ``uint16``
bits. Kernels return status codes instead of raising, because they run without the GIL.

Status codes of the sealing kernels: 0 sealed; otherwise 1 + the index of the first head whose values
cannot be stored in fp16 axes (its record is left unwritten).
"""

import math

import numpy as np
from numba import njit

from kvkernels.cpu.kernels.half import float_to_half, half_to_float

_JIT = {"cache": True, "nogil": True, "error_model": "numpy"}
_GROUP = 128
_ITERATIONS = 16

_STD_MIN, _STD_MAX = np.float32(1e-3), np.float32(1e3)
_LOG_MIN, _LOG_MAX = np.float32(-0.3), np.float32(10.0)
_STD_FLOOR, _STEP_MIN = np.float32(1e-8), np.float32(1e-10)
_ROOT_64, _ROOT_128 = np.float32(0.125), np.float32(1 / math.sqrt(128))
_ROOT_2, _HALF, _TWO = np.float32(1 / math.sqrt(2)), np.float32(0.5), np.float32(2.0)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_BIG = np.float32(3.0e38)


@njit(**_JIT)
def first_nonfinite(x):
    """Index of the first NaN or infinity in fp32 ``x [n]``, or -1."""
    n = x.shape[0]
    for start in range(0, n, 1024):
        stop = min(start + 1024, n)
        bad = 0
        for i in range(start, stop):  # counted, not tested one by one: the loop vectorises
            bad += not math.isfinite(x[i])
        if bad:
            for i in range(start, stop):
                if not math.isfinite(x[i]):
                    return i
    return -1


@njit(**_JIT)
def _rotate_row(x, y, d):
    """One row: fp32 ``x [d]`` -> ``y [d]`` (may not alias)."""
    width = min(d, 128)
    # Strides 1 and 2 together: groups of four lanes, which the compiler turns into shuffles.
    for i in range(0, d, 4):
        a, b = x[i] + x[i + 1], x[i] - x[i + 1]
        c, e = x[i + 2] + x[i + 3], x[i + 2] - x[i + 3]
        y[i], y[i + 1], y[i + 2], y[i + 3] = a + c, b + e, a - c, b - e
    for base in range(0, d, 16):  # strides 4 and 8
        for i in range(base, base + 4):
            a, b = y[i] + y[i + 4], y[i] - y[i + 4]
            c, e = y[i + 8] + y[i + 12], y[i + 8] - y[i + 12]
            y[i], y[i + 4], y[i + 8], y[i + 12] = a + c, b + e, a - c, b - e
    if width == 128:
        for base in range(0, d, 128):
            for i in range(base, base + 16):  # strides 16, 32 and 64, and the scale
                a0, a1 = y[i] + y[i + 16], y[i] - y[i + 16]
                a2, a3 = y[i + 32] + y[i + 48], y[i + 32] - y[i + 48]
                a4, a5 = y[i + 64] + y[i + 80], y[i + 64] - y[i + 80]
                a6, a7 = y[i + 96] + y[i + 112], y[i + 96] - y[i + 112]
                b0, b1, b2, b3 = a0 + a2, a1 + a3, a0 - a2, a1 - a3
                b4, b5, b6, b7 = a4 + a6, a5 + a7, a4 - a6, a5 - a7
                y[i] = (b0 + b4) * _ROOT_128
                y[i + 16] = (b1 + b5) * _ROOT_128
                y[i + 32] = (b2 + b6) * _ROOT_128
                y[i + 48] = (b3 + b7) * _ROOT_128
                y[i + 64] = (b0 - b4) * _ROOT_128
                y[i + 80] = (b1 - b5) * _ROOT_128
                y[i + 96] = (b2 - b6) * _ROOT_128
                y[i + 112] = (b3 - b7) * _ROOT_128
    else:
        for i in range(16):  # strides 16 and 32, and the scale
            a, b = y[i] + y[i + 16], y[i] - y[i + 16]
            c, e = y[i + 32] + y[i + 48], y[i + 32] - y[i + 48]
            y[i], y[i + 16] = (a + c) * _ROOT_64, (b + e) * _ROOT_64
            y[i + 32], y[i + 48] = (a - c) * _ROOT_64, (b - e) * _ROOT_64
    if d == 256:  # Hadamard across slices, one butterfly per in-slice channel
        for i in range(128):
            a, b = y[i], y[i + 128]
            y[i], y[i + 128] = (a + b) * _ROOT_2, (a - b) * _ROOT_2
    elif d == 512:
        for i in range(128):
            a, b = y[i] + y[i + 128], y[i] - y[i + 128]
            c, e = y[i + 256] + y[i + 384], y[i + 256] - y[i + 384]
            y[i], y[i + 128] = (a + c) * _HALF, (b + e) * _HALF
            y[i + 256], y[i + 384] = (a - c) * _HALF, (b - e) * _HALF


@njit(**_JIT)
def rotate_rows(x, out):
    """fp32 ``x [rows, D]`` -> rotated fp32 ``out [rows, D]``, D in 64, 128, 256, 512; no alias."""
    d = x.shape[1]
    for r in range(x.shape[0]):
        _rotate_row(x[r], out[r], d)


@njit(**_JIT)
def rotate_rows_to_half(x, out):
    """fp32 ``x [rows, D]`` -> stage rows: rotated, rounded to fp16 bits, uint16 ``out [rows, D]``."""
    d = x.shape[1]
    row = np.empty(d, np.float32)
    for r in range(x.shape[0]):
        _rotate_row(x[r], row, d)
        half = out[r]
        for i in range(d):
            half[i] = float_to_half(row[i])


@njit(**_JIT)
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


@njit(**_JIT)
def _log_step(log, std, e):
    """One clamped update of log scales (fp32, in place) and their exponentials ``e``."""
    for i in range(log.shape[0]):
        s = min(max(std[i], _STD_MIN), _STD_MAX)
        v = log[i] + np.float32(math.log(np.float64(s)))
        log[i] = min(max(v, _LOG_MIN), _LOG_MAX)
        e[i] = np.float32(math.exp(np.float64(log[i])))


@njit(**_JIT)
def _spread(std):
    lo, hi = std[0], std[0]
    for i in range(1, std.shape[0]):
        lo, hi = min(lo, std[i]), max(hi, std[i])
    return hi / max(lo, _STD_FLOOR)


@njit(**_JIT)
def _normalise(x, xt, bc, br):
    """Best scales bc fp32 [C], br fp32 [R] of tile ``x [R, C]`` (``xt`` its transpose)."""
    rows, cols = x.shape
    lc, lr = np.zeros(cols, np.float32), np.zeros(rows, np.float32)
    ec, er = np.ones(cols, np.float32), np.ones(rows, np.float32)
    col_std, row_std = np.empty(cols, np.float32), np.empty(rows, np.float32)
    sums = np.empty((3, _GROUP), np.float64)
    bc[:], br[:] = _ONE, _ONE
    _line_std(x, er, ec, col_std, sums)
    _line_std(xt, ec, er, row_std, sums)
    best = _spread(col_std) + _spread(row_std)
    for _ in range(_ITERATIONS):
        _log_step(lc, col_std, ec)
        _line_std(xt, ec, er, row_std, sums)
        _log_step(lr, row_std, er)
        _line_std(x, er, ec, col_std, sums)
        _line_std(xt, ec, er, row_std, sums)
        imb = _spread(col_std) + _spread(row_std)
        if imb <= best:
            best = imb
            bc[:], br[:] = ec, er


@njit(**_JIT)
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


@njit(**_JIT)
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


@njit(**_JIT)
def _pack_plane(codes, words, red, out, width, mask, shift):
    """Line words uint32 of one block: ``width``-bit fields of 32 reductions x 16 outputs."""
    for i in range(16 * width):
        words[i] = np.uint32(0)
    for quad in range(8):
        line = words[16 * (quad % width) : 16 * (quad % width) + 16]
        at = np.uint32((quad // width) * width)
        for i in range(4):
            c = codes[red + 4 * quad + i, out : out + 16]
            left = np.uint32(8 * i) + at
            for o in range(16):
                line[o] |= ((np.uint32(c[o]) >> shift) & mask) << left


@njit(**_JIT)
def _planes(bits):
    """(main, extra) widths of a line block; extra is 0 when there is one plane set (codec.md 5b)."""
    if bits == 3:
        return 2, 1
    if bits == 5:
        return 4, 1
    if bits == 6:
        return 4, 2
    return bits, 0


@njit(**_JIT)
def _pack_lines(codes, bits, words):
    """codes uint8 [RED, OUT] -> line words uint32 [RED * OUT * bits / 32]."""
    n_red, n_out = codes.shape
    main, extra = _planes(bits)
    mask, extra_mask = np.uint32((1 << main) - 1), np.uint32((1 << extra) - 1)
    at = 0
    for out in range(0, n_out, 16):
        for red in range(0, n_red, 32):
            block = words[at : at + 16 * main]
            _pack_plane(codes, block, red, out, main, mask, np.uint32(0))
            at += 16 * main
            if extra:
                block = words[at : at + 16 * extra]
                _pack_plane(codes, block, red, out, extra, extra_mask, np.uint32(main))
                at += 16 * extra


@njit(**_JIT)
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
        _pack_lines(codes, bits, record[:code_bytes].view(np.uint32))
        if not _write_axes(scale, zero, bc, record[code_bytes:].view(np.uint16)):
            return 1
    return 0


@njit(**_JIT)
def seal_groups(stage, is_value, bits, out):
    """uint16 ``stage [n, 128, D]`` -> line records uint8 ``out [n, nbytes]``, head after head.

    Threads take slices of both arrays. Returns 0, or 1 + the first index that could not be sealed.
    """
    for i in range(stage.shape[0]):
        if seal_head(stage[i], is_value, bits, out[i]) != 0:
            return 1 + i
    return 0


@njit(**_JIT)
def _unpack_block(words, main, extra, axes, red, out, rows, values):
    """Decode one line block into fp32 ``values [32, 16]`` ([reduction, output])."""
    mask, extra_mask = np.uint32((1 << main) - 1), np.uint32((1 << extra) - 1)
    high = words[16 * main :]
    left = np.uint32(main)
    other = np.empty(16, np.float32)
    for o in range(16):
        other[o] = half_to_float(axes[2 * rows + out + o])
    for quad in range(8):
        line = words[16 * (quad % main) : 16 * (quad % main) + 16]
        at = np.uint32((quad // main) * main)
        for i in range(4):
            right = at + np.uint32(8 * i)
            r = 4 * quad + i
            scale = half_to_float(axes[red + r])
            zero = half_to_float(axes[rows + red + r])
            value = values[r]
            if extra:
                top = high[16 * (quad % extra) : 16 * (quad % extra) + 16]
                down = np.uint32((quad // extra) * extra + 8 * i)
                for o in range(16):
                    code = (line[o] >> right) & mask
                    code |= ((top[o] >> down) & extra_mask) << left
                    value[o] = (np.float32(np.int32(code)) * scale + zero) * other[o]
            else:
                for o in range(16):
                    code = (line[o] >> right) & mask
                    value[o] = (np.float32(np.int32(code)) * scale + zero) * other[o]


@njit(**_JIT)
def decode_head(record, is_value, bits, d, out):
    """Line records uint8 ``record [nbytes]`` -> fp32 ``out [128, d]``, rows in the rotated domain."""
    width = min(d, 128)
    rows, cols = (_GROUP, width) if is_value else (width, _GROUP)
    code_bytes = rows * cols * bits // 8
    nbytes = code_bytes + 4 * rows + 2 * cols
    main, extra = _planes(bits)
    block = 16 * bits
    values = np.empty((32, 16), np.float32)
    for s in range(d // width):
        words = record[s * nbytes : s * nbytes + code_bytes].view(np.uint32)
        axes = record[s * nbytes + code_bytes : (s + 1) * nbytes].view(np.uint16)
        at = 0
        for o in range(0, cols, 16):
            for r in range(0, rows, 32):
                _unpack_block(words[at : at + block], main, extra, axes, r, o, rows, values)
                at += block
                if is_value:
                    for i in range(32):
                        dest = out[r + i, s * width + o : s * width + o + 16]
                        source = values[i]
                        for j in range(16):
                            dest[j] = source[j]
                else:
                    for j in range(16):
                        dest = out[o + j, s * width + r : s * width + r + 32]
                        for i in range(32):
                            dest[i] = values[i, j]


@njit(**_JIT)
def decode_groups(records, is_value, bits, d, out):
    """Line records uint8 ``records [n, nbytes]`` -> fp32 ``out [n, 128, d]``, rotated domain."""
    for i in range(records.shape[0]):
        decode_head(records[i], is_value, bits, d, out[i])
