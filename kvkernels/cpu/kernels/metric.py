"""Numba kernels of the aware encoder's metrics and of rounding with error feedback (codec.md 9).

K's errors are weighed by the queries of its rows, V's by the attention that these queries pay to
them: M sums q q^T, or p p^T. With M = R R^T, R upper, row i is coded at ``x_i + sum_k<i R_ki / R_ii
e_k`` with the plain errors e: the recursion with U = R^-1 written out, and no inverse to compute.
"""

import numpy as np
from numba import types

from kvkernels.cpu.columns import ERRORS_AT
from kvkernels.cpu.kernels.half import half_to_float
from kvkernels.cpu.kernels.jit import exact_inner, exact_kernel
from kvkernels.cpu.kernels.simd import load_half
from kvkernels.cpu.kernels.wide import (
    fma64,
    load64,
    max64,
    min64,
    power_of_two64,
    round64,
    splat64,
    store64,
    store_codes,
    sum64,
    widen,
)

_GROUP = 128
_LOWEST = -700.0  # e**x is 1e-304 there
_LN2_HIGH, _LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
#: float64 workspace of rounding: scale, zero, other, 1 / other, 512 each, and errors [rows, 16]
AXES = np.int64(1536)
ERRORS = np.int64(ERRORS_AT)


@exact_inner
def inverse(x):
    """1 / x, and 0 for 0: an axis that fp16 rounds to nothing decodes to nothing."""
    return 1.0 / x if x != 0.0 else 0.0


@exact_inner
def nearest(x, inv_other, zero, inv_scale, qmax):
    """Codes of sixteen values as whole float64 lanes."""
    v = round64((x * inv_other - zero) * inv_scale)
    return min64(max64(v, splat64(types.float64(0.0))), qmax)


@exact_inner
def _products(a, a_at, a_line, a_step, b, b_at, b_step, n, out, at, line):
    """``out[at + line * r :][:16]`` += sum over i < n of ``a[a_at + a_line * r + a_step * i]``
    times ``b[b_at + b_step * i :][:16]`` for eight lines r, in the order of i.
    """
    s0, s1, s2 = load64(out, at), load64(out, at + line), load64(out, at + 2 * line)
    s3, s4 = load64(out, at + 3 * line), load64(out, at + 4 * line)
    s5, s6, s7 = load64(out, at + 5 * line), load64(out, at + 6 * line), load64(out, at + 7 * line)
    for i in range(n):
        x, k = load64(b, b_at + b_step * i), a_at + a_step * i
        s0, s1 = fma64(splat64(a[k]), x, s0), fma64(splat64(a[k + a_line]), x, s1)
        s2 = fma64(splat64(a[k + 2 * a_line]), x, s2)
        s3 = fma64(splat64(a[k + 3 * a_line]), x, s3)
        s4 = fma64(splat64(a[k + 4 * a_line]), x, s4)
        s5 = fma64(splat64(a[k + 5 * a_line]), x, s5)
        s6 = fma64(splat64(a[k + 6 * a_line]), x, s6)
        s7 = fma64(splat64(a[k + 7 * a_line]), x, s7)
    store64(out, at, s0)
    store64(out, at + line, s1)
    store64(out, at + 2 * line, s2)
    store64(out, at + 3 * line, s3)
    store64(out, at + 4 * line, s4)
    store64(out, at + 5 * line, s5)
    store64(out, at + 6 * line, s6)
    store64(out, at + 7 * line, s7)


@exact_inner
def _add_outer(rows, dim, flat):
    """flat [dim * dim] (lower half) += sum over 128 rows of r r^T, row after row."""
    one, n = np.int64(1), np.int64(_GROUP)
    for j in range(0, dim, 16):
        for i in range(j, dim, 8):
            _products(rows, i, one, dim, rows, j, dim, n, flat, i * dim + j, dim)


@exact_inner
def _softmax(p, at, scale):
    """Softmax of the 128 values ``p[at:]`` times scale, in place."""
    for t in range(0, _GROUP, 16):
        store64(p, at + t, load64(p, at + t) * splat64(scale))
    highest = p[at]
    for t in range(_GROUP):
        highest = max(highest, p[at + t])
    one, total = splat64(types.float64(1.0)), splat64(types.float64(0.0))
    for t in range(0, _GROUP, 16):
        x = max64(load64(p, at + t) - splat64(highest), splat64(types.float64(_LOWEST)))
        k = round64(x * splat64(types.float64(1.4426950408889634)))
        r = fma64(k, splat64(types.float64(-_LN2_HIGH)), x)
        r = fma64(k, splat64(types.float64(-_LN2_LOW)), r)
        e = one
        for i in range(13):
            e = fma64(e, r * splat64(1.0 / np.float64(13 - i)), one)
        e = e * power_of_two64(k)
        total = total + e
        store64(p, at + t, e)
    share = splat64(1.0 / sum64(total))
    for t in range(0, _GROUP, 16):
        store64(p, at + t, load64(p, at + t) * share)


@exact_kernel
def widen_keys(k, out):
    """uint16 ``k [D * 128]`` -> float64."""
    for i in range(0, k.shape[0], 16):
        store64(out, i, widen(load_half(k, i)))


@exact_kernel
def add_moments(q, keys, scale, rows, p, m_k, m_v):
    """One head's part of both metrics: m_k [D * D] += q q^T, m_v [128 * 128] += p p^T; lower
    halves.

    ``q`` uint16 [D * 128] and ``keys`` float64 [D * 128] by channel; p is the softmax over the
    record's own tokens, causal or not: these queries stand for those to come. ``rows`` float64
    [128 * D] and ``p`` float64 [128 * 128] are workspaces. Tokens are added in order.
    """
    dim = q.shape[0] // _GROUP
    for i in range(dim):
        for t in range(_GROUP):
            rows[t * dim + i] = np.float64(half_to_float(q[i * _GROUP + t]))
    _add_outer(rows, dim, m_k)
    for i in range(0, _GROUP * _GROUP, 16):
        store64(p, i, splat64(types.float64(0.0)))
    n = np.int64(_GROUP)
    for j in range(0, _GROUP, 16):
        for t in range(0, _GROUP, 8):
            at = t * dim
            _products(rows, at, dim, np.int64(1), keys, j, n, dim, p, t * _GROUP + j, n)
    for t in range(_GROUP):
        _softmax(p, t * _GROUP, scale)
    _add_outer(p, np.int64(_GROUP), m_v)


@exact_inner
def loudest_first(m, d, n, order):
    """``order [n]``: rows by falling M_ii * weight, ``d[ERRORS + i]`` holding the weights."""
    for i in range(n):
        key = m[i, i] * d[ERRORS + i]
        d[ERRORS + i] = key
        at = i
        while at > 0 and d[ERRORS + order[at - 1]] < key:
            order[at] = order[at - 1]
            at -= 1
        order[at] = i


@exact_inner
def factor(m, order, damping, flat):
    """Feedback of the damped metric in that order: ``flat[i, k]`` = R_ki / R_ii for k < i.

    Reads the lower half of ``m``. Columns of R from the last to the first, each from what is left.
    """
    n = m.shape[0]
    trace = 0.0
    for i in range(n):
        trace += m[i, i]
    scale = np.float64(n) / trace if trace > 0.0 else 0.0
    for i in range(n):
        for k in range(i + 1):
            a, b = max(order[i], order[k]), min(order[i], order[k])
            flat[i * n + k] = m[a, b] * scale
        for k in range(i + 1, min(n, (i | 15) + 1)):
            flat[i * n + k] = 0.0  # read beside the diagonal, never used
        flat[i * n + i] += damping
    for i in range(n - 1, -1, -1):
        at = i * n
        scale = 1.0 / flat[at + i]
        for row in range(i):
            share = splat64(-flat[at + row] * scale)
            for k in range(0, row + 1, 16):
                to = row * n + k
                store64(flat, to, fma64(share, load64(flat, at + k), load64(flat, to)))
        for k in range(0, i, 16):
            store64(flat, at + k, load64(flat, at + k) * splat64(scale))


@exact_inner
def feed_back(tile, start, stride, n, cols, width, order, flat, d, qmax, codes):
    """Codes [n * cols] of rows ``tile[start + stride * i:]``, sixteen columns at a time.

    ``flat`` of :func:`factor`; axes at ``d[AXES:]``, ``other`` anew for every ``width`` rows.
    """
    top = splat64(qmax)
    for t in range(0, cols, 16):
        for i in range(0, n, 4):
            row = i * n
            x0 = widen(load_half(tile, start + order[i] * stride + t))
            x1 = widen(load_half(tile, start + order[i + 1] * stride + t))
            x2 = widen(load_half(tile, start + order[i + 2] * stride + t))
            x3 = widen(load_half(tile, start + order[i + 3] * stride + t))
            a0, a1, a2, a3 = x0, x1, x2, x3
            for k in range(i):
                e = load64(d, ERRORS + 16 * k)
                a0 = fma64(splat64(flat[row + k]), e, a0)
                a1 = fma64(splat64(flat[row + n + k]), e, a1)
                a2 = fma64(splat64(flat[row + 2 * n + k]), e, a2)
                a3 = fma64(splat64(flat[row + 3 * n + k]), e, a3)
            for j in range(4):
                at = order[i + j]
                side = AXES + 1024 + at // width * _GROUP + t
                scale, zero = d[AXES + at], splat64(d[AXES + 512 + at])
                code = nearest(a0, load64(d, side + 512), zero, splat64(inverse(scale)), top)
                store_codes(codes, at * cols + t, code)
                e = x0 - (code * splat64(scale) + zero) * load64(d, side)
                store64(d, ERRORS + 16 * (i + j), e)
                if j < 3:  # the next row becomes a0
                    next_row = row + (j + 1) * n + i + j
                    a0, x0 = fma64(splat64(flat[next_row]), e, a1), x1
                    a1, x1 = a2, x2
                    if j < 2:
                        a1 = fma64(splat64(flat[next_row + n]), e, a2)
                        a2, x2 = a3, x3
                    if j < 1:
                        a2 = fma64(splat64(flat[next_row + 2 * n]), e, a3)
