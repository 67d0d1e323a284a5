"""Numba kernels of the ``aware`` encoder (codec.md 9): ``reference_aware`` in float64.

Sums run in another order than NumPy's and the feedback comes from another factor of the same
metric, so a code can differ from the reference where a value is a rounding error from a tie. Every
operation order is fixed here: the same bits on every CPU and for every way the rows came in.
"""

import math

import numpy as np
from numba import types

from kvkernels.cpu.kernels.balance import BC, SCALE, ZERO, normalise
from kvkernels.cpu.kernels.half import half_to_float
from kvkernels.cpu.kernels.jit import exact_inner, exact_kernel
from kvkernels.cpu.kernels.lines import pack_lines
from kvkernels.cpu.kernels.metric import (
    AXES,
    ERRORS,
    factor,
    feed_back,
    inverse,
    loudest_first,
    nearest,
)
from kvkernels.cpu.kernels.seal import quantise, read_slice, write_axes
from kvkernels.cpu.kernels.simd import load
from kvkernels.cpu.kernels.wide import fma64, load64, splat64, store64, store_codes, sum64, widen

_GROUP = 128
_K_DAMPING, _V_DAMPING = 0.1, 0.3
_SHRINKS, _REFITS = 11, 4
_TINY, _LEAST_SCALE, _LEAST_OTHER = 1e-12, 1e-10, 1e-8
# Vectors of one tile in the float64 workspace, after the 512 of ``normalise``: axes, 1 / other,
# other**2, sums over rows of y * y and x * y.
_S, _Z, _O, _INV_O, _W, _DEN, _NUM = (np.int64(512 + 128 * i) for i in range(7))


@exact_inner
def _begin(tile, is_value, index, width, bits, w, d, codes):
    """The published axes of a slice as float64 at ``d[_S:]``, its values at ``w[0:]``."""
    rows, cols = (_GROUP, width) if is_value else (width, _GROUP)
    if not read_slice(tile, is_value, index, width, w):
        return False
    normalise(w, d, rows, cols)
    quantise(w, rows, cols, bits, codes)
    for r in range(rows):
        d[_S + r], d[_Z + r] = np.float64(w[SCALE + r]), np.float64(w[ZERO + r])
    for c in range(cols):
        d[_O + c] = np.float64(w[BC + c])
    return True


@exact_inner
def _invert_other(d, cols):
    for c in range(cols):
        d[_INV_O + c] = inverse(d[_O + c])
        d[_W + c] = d[_O + c] * d[_O + c]


@exact_inner
def _clip(w, d, rows, cols, qmax):
    """Shrink rows' ranges about their centres by the factor of least error."""
    top = splat64(qmax)
    for r in range(rows):
        scale, at = d[_S + r], r * cols
        half = scale * qmax / 2.0
        centre = d[_Z + r] + half
        best = math.inf
        for step in range(_SHRINKS):
            factor = np.float64(20 - step) / 20.0
            s, z = scale * factor, centre - half * factor
            vs, vz, vi = splat64(s), splat64(z), splat64(inverse(s))
            total = splat64(types.float64(0.0))
            for c in range(0, cols, 16):
                x = widen(load(w, at + c))
                code = nearest(x, load64(d, _INV_O + c), vz, vi, top)
                e = x - (code * vs + vz) * load64(d, _O + c)
                total = fma64(e, e, total)
            error = sum64(total)
            if error < best:
                best, d[_S + r], d[_Z + r] = error, s, z


@exact_inner
def _refit(w, d, rows, cols, qmax):
    """Least squares of (scale, zero) of every row for the codes at hand, then of ``other``."""
    top, nothing = splat64(qmax), splat64(types.float64(0.0))
    total = nothing
    for c in range(0, cols, 16):
        total = total + load64(d, _W + c)
        store64(d, _DEN + c, nothing)
        store64(d, _NUM + c, nothing)
    weight = sum64(total)
    for r in range(rows):
        at = r * cols
        vz, vi = splat64(d[_Z + r]), splat64(inverse(d[_S + r]))
        sum_q = sum_b = nothing
        for c in range(0, cols, 16):
            x = widen(load(w, at + c))
            code = nearest(x, load64(d, _INV_O + c), vz, vi, top)
            v = load64(d, _W + c)
            sum_q = fma64(code, v, sum_q)
            sum_b = fma64(x * load64(d, _INV_O + c), v, sum_b)
        mean_q, mean_b = sum64(sum_q) / weight, sum64(sum_b) / weight
        mq, mb = splat64(mean_q), splat64(mean_b)
        var = cov = nothing
        for c in range(0, cols, 16):
            x = widen(load(w, at + c))
            code = nearest(x, load64(d, _INV_O + c), vz, vi, top) - mq
            v = load64(d, _W + c)
            var = fma64(code * code, v, var)
            cov = fma64(code * (x * load64(d, _INV_O + c) - mb), v, cov)
        spread, scale = sum64(var), d[_S + r]
        fitted = sum64(cov) / spread if spread > _TINY else 0.0
        zero = d[_Z + r]
        if fitted > _LEAST_SCALE:
            scale, zero = fitted, mean_b - fitted * mean_q
        vs, v_zero = splat64(scale), splat64(zero)
        for c in range(0, cols, 16):
            x = widen(load(w, at + c))
            y = nearest(x, load64(d, _INV_O + c), vz, vi, top) * vs + v_zero
            store64(d, _DEN + c, fma64(y, y, load64(d, _DEN + c)))
            store64(d, _NUM + c, fma64(x, y, load64(d, _NUM + c)))
        d[_S + r], d[_Z + r] = scale, zero
    for c in range(cols):
        other = d[_NUM + c] / d[_DEN + c] if d[_DEN + c] > _TINY else 0.0
        if other > _LEAST_OTHER:
            d[_O + c] = other


@exact_inner
def _round_axes(w, d, rows, cols, out, at):
    """Axes as fp16 into the record and back into ``d``; False when one is not finite."""
    for r in range(rows):
        w[SCALE + r], w[ZERO + r] = np.float32(d[_S + r]), np.float32(d[_Z + r])
    for c in range(cols):
        w[BC + c] = np.float32(d[_O + c])
    if not write_axes(w, rows, cols, out, at):
        return False
    for i in range(2 * rows + cols):
        bits = np.uint16(out[at + 2 * i]) | np.uint16(np.uint16(out[at + 2 * i + 1]) << 8)
        value = np.float64(half_to_float(np.uint16(bits)))
        if i < rows:
            d[_S + i] = value
        elif i < 2 * rows:
            d[_Z + i - rows] = value
        else:
            d[_O + i - 2 * rows] = value
    return True


@exact_inner
def _place_axes(d, row, rows, column, cols):
    """Rounded axes of a slice to where ``feed_back`` reads them."""
    for i in range(rows):
        d[AXES + row + i], d[AXES + 512 + row + i] = d[_S + i], d[_Z + i]
    for i in range(cols):
        d[AXES + 1024 + column + i] = d[_O + i]
        d[AXES + 1536 + column + i] = inverse(d[_O + i])


@exact_kernel
def seal_value(tile, m, weighed, bits, w, d, flat, order, codes, out):
    """``seal.seal_head`` for V by the aware encoder; workspaces: ``columns.aware_workspace``.

    ``m`` [128, 128]: the metric over tokens; not ``weighed``: there is none, plain rounding.
    """
    dim = tile.shape[0] // _GROUP
    width = min(dim, 128)
    qmax = np.float64((1 << bits) - 1)
    code_bytes = _GROUP * width * bits // 8
    at = np.int64(0)
    if weighed:
        for i in range(_GROUP):
            d[ERRORS + i] = 1.0
        loudest_first(m, d, np.int64(_GROUP), order)
        factor(m, order, _V_DAMPING, flat)
    for s in range(dim // width):
        if not _begin(tile, True, s, width, bits, w, d, codes):
            return 1
        _invert_other(d, width)
        _clip(w, d, _GROUP, width, qmax)
        for _ in range(_REFITS):
            _refit(w, d, _GROUP, width, qmax)
            _invert_other(d, width)
        if not _round_axes(w, d, _GROUP, width, out, at + code_bytes):
            return 1
        _invert_other(d, width)
        if weighed:
            _place_axes(d, 0, _GROUP, 0, width)
            n = np.int64(_GROUP)
            feed_back(tile, s * width, dim, n, width, n, order, flat, d, qmax, codes)
        else:
            top = splat64(qmax)
            for r in range(_GROUP):
                vz, vi = splat64(d[_Z + r]), splat64(inverse(d[_S + r]))
                for c in range(0, width, 16):
                    x = widen(load(w, r * width + c))
                    code = nearest(x, load64(d, _INV_O + c), vz, vi, top)
                    store_codes(codes, r * width + c, code)
        pack_lines(codes, np.int64(_GROUP), width, bits, out, at)
        at += code_bytes + 4 * _GROUP + 2 * width
    return 0


@exact_kernel
def seal_keys(tile, m, may_refit, bits, w, d, flat, order, codes, out):
    """``seal.seal_head`` for K by the aware encoder, with the metric ``m`` [D, D] over channels.

    Channels are coded from the loudest to the quietest: M_ii times the mean square of a step.
    """
    dim = tile.shape[0] // _GROUP
    width = min(dim, 128)
    qmax = np.float64((1 << bits) - 1)
    code_bytes = width * _GROUP * bits // 8
    nbytes = code_bytes + 4 * width + 2 * _GROUP
    for s in range(dim // width):
        if not _begin(tile, False, s, width, bits, w, d, codes):
            return 1
        if bits == 2 and may_refit:
            _invert_other(d, _GROUP)
            _refit(w, d, width, _GROUP, qmax)
        if not _round_axes(w, d, width, _GROUP, out, s * nbytes + code_bytes):
            return 1
        _invert_other(d, _GROUP)
        _place_axes(d, s * width, width, s * _GROUP, _GROUP)
        total = splat64(types.float64(0.0))
        for t in range(0, _GROUP, 16):
            total = total + load64(d, _W + t)
        square = sum64(total)
        for i in range(width):
            d[ERRORS + s * width + i] = d[_S + i] * d[_S + i] * square
    loudest_first(m, d, dim, order)
    factor(m, order, _K_DAMPING, flat)
    feed_back(tile, 0, _GROUP, dim, _GROUP, width, order, flat, d, qmax, codes)
    for s in range(dim // width):
        part = codes[s * width * _GROUP : (s + 1) * width * _GROUP]
        pack_lines(part, width, np.int64(_GROUP), bits, out, s * nbytes)
    return 0
