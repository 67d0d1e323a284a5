"""Numba kernels of the ``aware`` encoder (codec.md 9): ``reference_aware`` in float64.

Sums run in another order than NumPy's and K's error feedback comes from another factor of the same
metric: with M = R R^T, R upper, channel i is coded at ``x_i + sum_k<i R_ki / R_ii e_k`` with the
plain errors e, which is the recursion with U = R^-1 written out. So a code can differ from the
reference where both are a rounding error from a tie. Every operation order is fixed here: the same
bits on every CPU and for every way the rows came in.
"""

import math
from typing import Any

import numpy as np
from numba import types

from kvkernels.cpu.kernels.balance import BC, F32_WORK, SCALE, ZERO, normalise
from kvkernels.cpu.kernels.half import half_to_float
from kvkernels.cpu.kernels.jit import exact_inner, exact_kernel
from kvkernels.cpu.kernels.lines import pack_lines
from kvkernels.cpu.kernels.seal import quantise, read_slice, write_axes
from kvkernels.cpu.kernels.simd import load, load_half
from kvkernels.cpu.kernels.wide import (
    fma64,
    load64,
    max64,
    min64,
    round64,
    splat64,
    store64,
    store_codes,
    sum64,
    widen,
)

_GROUP = 128
_DAMPING, _SHRINKS, _REFITS = 0.1, 11, 4
_TINY, _LEAST_SCALE, _LEAST_OTHER = 1e-12, 1e-10, 1e-8
# Vectors of one tile in the float64 workspace of seal_value and seal_keys, after the 512 of
# ``normalise``: axes, their inverses, sums over rows of y * y and x * y.
_S, _Z, _O, _INV_O, _W, _DEN, _NUM = (np.int64(512 + 128 * i) for i in range(7))
_AXES = np.int64(1536)  # scale, zero, other, 1 / other of all slices of K, 512 each
_ERRORS = np.int64(3584)  # [D, 16]


def aware_workspace(dim: int) -> tuple[Any, Any, Any]:
    """Workspaces ``w, d, codes`` of the seal kernels here, one set for every thread that seals."""
    return (
        np.empty(F32_WORK, np.float32),
        np.empty(int(_ERRORS) + 16 * dim, np.float64),
        np.empty(dim * _GROUP, np.uint8),
    )


@exact_inner
def _inverse(x):
    return 1.0 / x if x != 0.0 else 0.0


@exact_kernel
def add_moment(q, rows, m):
    """m [D, D] (lower half) += sum over tokens of q q^T; uint16 ``q [D * 128]`` by channel.

    ``rows`` float64 [128 * D] is a workspace. Tokens are added in order.
    """
    dim = m.shape[0]
    for i in range(dim):
        for t in range(_GROUP):
            rows[t * dim + i] = np.float64(half_to_float(q[i * _GROUP + t]))
    flat = m.reshape(dim * dim)
    for i in range(0, dim, 4):
        for j in range(0, i + 4, 16):
            at = i * dim + j
            a0, a1 = load64(flat, at), load64(flat, at + dim)
            a2, a3 = load64(flat, at + 2 * dim), load64(flat, at + 3 * dim)
            for t in range(_GROUP):
                row = t * dim
                x = load64(rows, row + j)
                a0 = fma64(splat64(rows[row + i]), x, a0)
                a1 = fma64(splat64(rows[row + i + 1]), x, a1)
                a2 = fma64(splat64(rows[row + i + 2]), x, a2)
                a3 = fma64(splat64(rows[row + i + 3]), x, a3)
            store64(flat, at, a0)
            store64(flat, at + dim, a1)
            store64(flat, at + 2 * dim, a2)
            store64(flat, at + 3 * dim, a3)


@exact_kernel
def factor_moment(m, r):
    """Feedback of the damped metric: ``r[i, k]`` = R_ki / R_ii for k < i; reads ``m``'s lower half.

    M = R R^T with R upper: columns of R from the last to the first, each taken from what is left.
    """
    dim = m.shape[0]
    trace = 0.0
    for i in range(dim):
        trace += m[i, i]
    scale = splat64(np.float64(dim) / trace if trace > 0.0 else 0.0)
    source, flat = m.reshape(dim * dim), r.reshape(dim * dim)
    for i in range(dim):
        for k in range(0, i + 1, 16):
            store64(flat, i * dim + k, load64(source, i * dim + k) * scale)
        flat[i * dim + i] += _DAMPING
    for i in range(dim - 1, -1, -1):
        at = i * dim
        inverse = 1.0 / flat[at + i]
        for row in range(i):
            share = splat64(-flat[at + row] * inverse)
            for k in range(0, row + 1, 16):
                to = row * dim + k
                store64(flat, to, fma64(share, load64(flat, at + k), load64(flat, to)))
        for k in range(0, i, 16):
            store64(flat, at + k, load64(flat, at + k) * splat64(inverse))


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
        d[_INV_O + c] = _inverse(d[_O + c])
        d[_W + c] = d[_O + c] * d[_O + c]


@exact_inner
def _nearest(x, inv_other, zero, inv_scale, qmax):
    """Codes of sixteen values as whole float64 lanes."""
    v = round64((x * inv_other - zero) * inv_scale)
    return min64(max64(v, splat64(types.float64(0.0))), qmax)


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
            vs, vz, vi = splat64(s), splat64(z), splat64(_inverse(s))
            total = splat64(types.float64(0.0))
            for c in range(0, cols, 16):
                x = widen(load(w, at + c))
                code = _nearest(x, load64(d, _INV_O + c), vz, vi, top)
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
        vz, vi = splat64(d[_Z + r]), splat64(_inverse(d[_S + r]))
        sum_q = sum_b = nothing
        for c in range(0, cols, 16):
            x = widen(load(w, at + c))
            code = _nearest(x, load64(d, _INV_O + c), vz, vi, top)
            v = load64(d, _W + c)
            sum_q = fma64(code, v, sum_q)
            sum_b = fma64(x * load64(d, _INV_O + c), v, sum_b)
        mean_q, mean_b = sum64(sum_q) / weight, sum64(sum_b) / weight
        mq, mb = splat64(mean_q), splat64(mean_b)
        var = cov = nothing
        for c in range(0, cols, 16):
            x = widen(load(w, at + c))
            code = _nearest(x, load64(d, _INV_O + c), vz, vi, top) - mq
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
            y = _nearest(x, load64(d, _INV_O + c), vz, vi, top) * vs + v_zero
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


@exact_kernel
def seal_value(tile, bits, w, d, codes, out):
    """``seal.seal_head`` for V by the aware encoder; workspaces: :func:`aware_workspace`."""
    width = min(tile.shape[0] // _GROUP, 128)
    qmax = np.float64((1 << bits) - 1)
    top = splat64(qmax)
    code_bytes = _GROUP * width * bits // 8
    at = np.int64(0)
    for s in range(tile.shape[0] // _GROUP // width):
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
        for r in range(_GROUP):
            vz, vi = splat64(d[_Z + r]), splat64(_inverse(d[_S + r]))
            for c in range(0, width, 16):
                x = widen(load(w, r * width + c))
                code = _nearest(x, load64(d, _INV_O + c), vz, vi, top)
                store_codes(codes, r * width + c, code)
        pack_lines(codes, np.int64(_GROUP), width, bits, out, at)
        at += code_bytes + 4 * _GROUP + 2 * width
    return 0


@exact_inner
def _feed_back(tile, r, d, dim, width, qmax, codes):
    """Codes [dim * 128] of all channels: sixteen tokens at a time, errors at ``d[_ERRORS:]``."""
    top, flat = splat64(qmax), r.reshape(dim * dim)
    for t in range(0, _GROUP, 16):
        for i in range(0, dim, 4):
            row = i * dim
            slice_other = _AXES + 1024 + i // width * _GROUP + t
            other = load64(d, slice_other)
            inv_other = load64(d, slice_other + 512)
            x0 = widen(load_half(tile, i * _GROUP + t))
            x1 = widen(load_half(tile, (i + 1) * _GROUP + t))
            x2 = widen(load_half(tile, (i + 2) * _GROUP + t))
            x3 = widen(load_half(tile, (i + 3) * _GROUP + t))
            a0, a1, a2, a3 = x0, x1, x2, x3
            for k in range(i):
                e = load64(d, _ERRORS + 16 * k)
                a0 = fma64(splat64(flat[row + k]), e, a0)
                a1 = fma64(splat64(flat[row + dim + k]), e, a1)
                a2 = fma64(splat64(flat[row + 2 * dim + k]), e, a2)
                a3 = fma64(splat64(flat[row + 3 * dim + k]), e, a3)
            for j in range(4):
                scale, zero = d[_AXES + i + j], splat64(d[_AXES + 512 + i + j])
                code = _nearest(a0, inv_other, zero, splat64(_inverse(scale)), top)
                store_codes(codes, (i + j) * _GROUP + t, code)
                e = x0 - (code * splat64(scale) + zero) * other
                store64(d, _ERRORS + 16 * (i + j), e)
                if j < 3:  # the next channel becomes a0
                    at = row + (j + 1) * dim + i + j
                    a0, x0 = fma64(splat64(flat[at]), e, a1), x1
                    a1, x1 = a2, x2
                    if j < 2:
                        a1 = fma64(splat64(flat[at + dim]), e, a2)
                        a2, x2 = a3, x3
                    if j < 1:
                        a2 = fma64(splat64(flat[at + 2 * dim]), e, a3)


@exact_kernel
def seal_keys(tile, r, may_refit, bits, w, d, codes, out):
    """``seal.seal_head`` for K by the aware encoder, with ``r`` of :func:`factor_moment`.

    ``w, d, codes`` are :func:`aware_workspace`.
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
        for i in range(width):
            d[_AXES + s * width + i], d[_AXES + 512 + s * width + i] = d[_S + i], d[_Z + i]
        for t in range(_GROUP):
            d[_AXES + 1024 + s * _GROUP + t] = d[_O + t]
            d[_AXES + 1536 + s * _GROUP + t] = _inverse(d[_O + t])
    _feed_back(tile, r, d, dim, width, qmax, codes)
    for s in range(dim // width):
        part = codes[s * width * _GROUP : (s + 1) * width * _GROUP]
        pack_lines(part, width, np.int64(_GROUP), bits, out, s * nbytes)
    return 0
