"""Variance normalisation of a tile (codec.md 4): ``reference.normalise`` to the byte, much faster.

The scaled tile is never stored. One sweep divides every value as the reference does and sums it and
its square in float64, along rows and columns at once: squares of float32 are exact in float64, so
the only difference from the reference is the order of additions. Every standard deviation carries a
bound of that difference; where the bound leaves its float32 rounding open (about once in 10**5), or
that of a logarithm or an exponential, the value is computed again the reference's way.
"""

import math

import numpy as np
from numba import types

from kvkernels.cpu.kernels.jit import exact_inner
from kvkernels.cpu.kernels.simd import hmax, load, splat, store, vmax, vmin
from kvkernels.cpu.kernels.wide import (
    differ,
    exponent,
    fma64,
    load64,
    mantissa,
    max64,
    narrow,
    power_of_two64,
    round64,
    splat64,
    sqrt64,
    store64,
    store_sums,
    widen,
)

_ITERATIONS = 16
_STD_MIN, _STD_MAX = np.float32(1e-3), np.float32(1e3)
_LOG_MIN, _LOG_MAX = np.float32(-0.3), np.float32(10.0)
_STD_FLOOR, _ZERO, _ONE = np.float32(1e-8), np.float32(0.0), np.float32(1.0)

# |sum of squares of deviations - the reference's| <= _SLACK * (sum of squares + n * first**2): n
# additions in each of two orders, n <= 128, unit 2**-53; the reference deviates from the first.
_SLACK = 1.5e-13
_RELATIVE = 2e-11  # bound of _log and _exp
_LN2, _LN2_HIGH, _LN2_LOW = 0.6931471805599453, 0.693147180369123816490, 1.90821492927058770002e-10

# One workspace instead of arrays: what a kernel allocates or passes costs compile time. ``w`` is
# float32 [F32_WORK] with the tile at 0 and vectors of up to 128 from 16384 on, ``d`` float64.
# Offsets are NumPy integers: Numba would compile a callee anew for every literal.
BC, BR, SCALE, ZERO, LINE = (np.int64(16384 + 128 * i) for i in range(5))
_LC, _LR, _EC, _ER, _COL, _ROW, _EDGE = (np.int64(17024 + 128 * i) for i in range(7))
_ROW_SUM, _ROW_SQUARE, _COL_SUM, _COL_SQUARE = (np.int64(128 * i) for i in range(4))
_AT_0, _APART = np.int64(0), np.int64(1)


@exact_inner
def _sweep(w, d, rows, cols, columns):
    """Sums and sums of squares of x / (er * ec): of every row and, if asked, of every column."""
    nothing = splat64(types.float64(0.0))
    if columns:
        for c in range(0, 256, 16):
            store64(d, _COL_SUM + c, nothing)
    for r in range(0, rows, 4):
        e0, e1 = splat(w[_ER + r]), splat(w[_ER + r + 1])
        e2, e3 = splat(w[_ER + r + 2]), splat(w[_ER + r + 3])
        s0 = s1 = s2 = s3 = q0 = q1 = q2 = q3 = nothing
        at = r * cols
        for c in range(0, cols, 16):
            e = load(w, _EC + c)
            a0 = widen(load(w, at + c) / (e0 * e))
            a1 = widen(load(w, at + cols + c) / (e1 * e))
            a2 = widen(load(w, at + 2 * cols + c) / (e2 * e))
            a3 = widen(load(w, at + 3 * cols + c) / (e3 * e))
            s0, s1, s2, s3 = s0 + a0, s1 + a1, s2 + a2, s3 + a3
            q0, q1 = fma64(a0, a0, q0), fma64(a1, a1, q1)
            q2, q3 = fma64(a2, a2, q2), fma64(a3, a3, q3)
            if columns:
                store64(d, _COL_SUM + c, load64(d, _COL_SUM + c) + ((a0 + a1) + (a2 + a3)))
                square = fma64(a1, a1, fma64(a0, a0, load64(d, _COL_SQUARE + c)))
                store64(d, _COL_SQUARE + c, fma64(a3, a3, fma64(a2, a2, square)))
        store_sums(d, _ROW_SUM + r, s0, s1, s2, s3)
        store_sums(d, _ROW_SQUARE + r, q0, q1, q2, q3)


@exact_inner
def _line_std(w, start, stride, n, e_line, along):
    """``reference._column_std`` of one line."""
    first = np.float64(w[start] / (e_line * w[along]))
    total, square = 0.0, 0.0
    for i in range(n):
        x = np.float64(w[start + i * stride] / (e_line * w[along + i])) - first
        total += x
        square += x * x
    return np.float32(math.sqrt(max((square - total * total / n) / (n - 1), 0.0)))


@exact_inner
def _stds(w, d, lines, n, sums, own, along, edge, stride, step, std):
    """Standard deviations of lines of ``n`` values from the sums of a sweep, at ``w[std:]``.

    ``own`` and ``along`` are the scales of the lines and inside a line, ``edge`` the lines' first
    values; values of a line are ``step`` apart, lines ``stride``.
    """
    count = np.float64(n)
    inverse, degrees = splat64(1.0 / count), splat64(1.0 / (count - 1.0))
    slack = splat64(_SLACK / (count - 1.0))
    e0, nothing = splat(w[along]), splat64(types.float64(0.0))
    for i in range(0, lines, 16):
        s, q = load64(d, sums + i), load64(d, sums + 128 + i)
        first = widen(load(w, edge + i) / (load(w, own + i) * e0))
        root = sqrt64(max64((q - s * s * inverse) * degrees, nothing))
        # sqrt(var +- bound) lies within root +- bound / root. NaN (a constant line) counts as open.
        bound = narrow(slack * fma64(splat64(count) * first, first, q)) / narrow(root)
        bound = widen(bound * splat(types.float32(1.001)))
        low = narrow(root - bound)
        store(w, std + i, low)
        open_lanes = differ(low, narrow(root + bound))
        if open_lanes != 0:
            for j in range(i, i + 16):
                if (open_lanes >> (j - i)) & 1:
                    w[std + j] = _line_std(w, j * stride, step, n, w[own + j], along)


@exact_inner
def _log_step(w, n, log, std, e):
    """One clamped update of log scales (fp32, in place) and their exponentials ``e``."""
    one = splat64(types.float64(1.0))
    less = splat64(types.float64(1.0 - _RELATIVE))
    more = splat64(types.float64(1.0 + _RELATIVE))
    for i in range(0, n, 16):
        value = vmin(vmax(load(w, std + i), splat(_STD_MIN)), splat(_STD_MAX))
        m = mantissa(value)
        f = (m - one) / (m + one)
        g = f * f
        p = splat64(types.float64(2.0 / 15.0))
        for k in range(7):  # 2 f (1 + g / 3 + g**2 / 5 + ...)
            p = fma64(p, g, splat64(2.0 / np.float64(13 - 2 * k)))
        ln = fma64(exponent(value), splat64(types.float64(_LN2)), f * p)
        low = narrow(ln * less)
        open_lanes = differ(low, narrow(ln * more))
        before = load(w, log + i)
        store(w, log + i, vmin(vmax(before + low, splat(_LOG_MIN)), splat(_LOG_MAX)))
        if open_lanes != 0:
            store(w, e + i, before)
            for j in range(i, i + 16):
                if (open_lanes >> (j - i)) & 1:
                    v = np.float64(min(max(w[std + j], _STD_MIN), _STD_MAX))
                    v32 = w[e + j] + np.float32(math.log(v))
                    w[log + j] = min(max(v32, _LOG_MIN), _LOG_MAX)
    for i in range(0, n, 16):
        x = widen(load(w, log + i))
        k = round64(x * splat64(types.float64(1.4426950408889634)))
        r = fma64(k, splat64(types.float64(-_LN2_HIGH)), x)
        r = fma64(k, splat64(types.float64(-_LN2_LOW)), r)
        p = one
        for m in range(10):  # 1 + r / 1 (1 + r / 2 (1 + r / 3 ...))
            p = fma64(p, r * splat64(1.0 / np.float64(10 - m)), one)
        power = p * power_of_two64(k)
        low = narrow(power * less)
        open_lanes = differ(low, narrow(power * more))
        store(w, e + i, low)
        if open_lanes != 0:
            for j in range(i, i + 16):
                if (open_lanes >> (j - i)) & 1:
                    w[e + j] = np.float32(math.exp(np.float64(w[log + j])))


@exact_inner
def _spread(w, std, n):
    low = high = load(w, std)
    for i in range(16, n, 16):
        v = load(w, std + i)
        low, high = vmin(v, low), vmax(v, high)
    return hmax(high) / max(-hmax(splat(_ZERO) - low), _STD_FLOOR)


@exact_inner
def normalise(w, d, rows, cols):
    """Best scales of the fp32 tile ``w[: rows * cols]``: columns at ``w[BC:]``, rows ``w[BR:]``."""
    for i in range(128):
        w[_LC + i], w[_LR + i], w[_EC + i], w[_ER + i] = _ZERO, _ZERO, _ONE, _ONE
    for r in range(rows):
        w[_EDGE + r] = w[r * cols]
    best = _ONE
    for half in range(2 * _ITERATIONS + 1):
        # Even: iterate half / 2; 0 is the identity, which can win. Odd: columns moved, rows next.
        full = half % 2 == 0
        _sweep(w, d, rows, cols, full)
        _stds(w, d, rows, cols, _ROW_SUM, _ER, _EC, _EDGE, cols, _APART, _ROW)
        if full:
            _stds(w, d, cols, rows, _COL_SUM, _EC, _ER, _AT_0, _APART, cols, _COL)
            imb = _spread(w, _COL, cols) + _spread(w, _ROW, rows)
            if half == 0 or imb <= best:
                best = imb
                for i in range(0, 128, 16):
                    store(w, BC + i, load(w, _EC + i))
                    store(w, BR + i, load(w, _ER + i))
            _log_step(w, cols, _LC, _COL, _EC)
        else:
            _log_step(w, rows, _LR, _ROW, _ER)
