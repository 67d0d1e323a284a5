"""The ``aware`` encoder in readable float64 NumPy (codec.md 9): the published encoder's axes, then
codes and axes chosen for what attention makes of them. Same decoder, same layout.

K: codes channel after channel with error feedback, so that errors cancel in the scores of the
queries the record has seen. V: a clipped range per token, axes fitted to the codes, and error
feedback over tokens, so that errors cancel in what these queries read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.cpu import reference
from kvkernels.errors import InputError
from kvkernels.records.layout import GROUP, LINE, HeadLayout, Side
from kvkernels.records.packing import join

F64 = NDArray[np.float64]
Halves = NDArray[np.float16]
Bytes = NDArray[np.uint8]
Axes = tuple[F64, F64, F64]  # scale [R], zero [R], other [C]

K_DAMPING, V_DAMPING = 0.1, 0.3
SHRINK = tuple((20 - i) / 20 for i in range(11))  # 1, .95, ... .5
REFITS = 4


def moment(q: Halves) -> F64:
    """M [D, D] of rotated fp16 queries [heads, 128, D]: the sum of q q^T, token after token."""
    m = np.zeros((q.shape[-1],) * 2)
    for token in q.astype(np.float64).swapaxes(0, 1):
        m += token.T @ token
    return m


def attention_moment(q: Halves, k: Halves, scale: float) -> F64:
    """M [128, 128] = sum of p p^T, p the attention of rotated queries [heads, 128, D] over the
    record's own keys [128, D], all of them: these queries stand for those to come.
    """
    m = np.zeros((len(k), len(k)))
    for head in q.astype(np.float64):
        score = head @ k.astype(np.float64).T * scale
        p = np.exp(score - score.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        m += p.T @ p
    return m


def feedback(m: F64, damping: float) -> F64:
    """U = chol(M^-1)^T, upper, of M * n / tr(M) + damping * I: any scale of M, and 0, will do."""
    trace = float(np.trace(m))
    scale = len(m) / trace if trace > 0 else 0.0
    return np.linalg.cholesky(np.linalg.inv(m * scale + damping * np.eye(len(m)))).T


def rounded(
    x: F64, scale: F64, zero: F64, others: F64, u: F64, order: NDArray[np.intp], qmax: int
) -> Bytes:
    """Codes of x [n, C], row after row in that order: the error of a row, divided by U_ii, is taken
    from every later row in proportion to U_ij. Columns are independent; ``others`` [n, C].
    """
    left, codes = x[order], np.empty(x.shape, np.uint8)
    for i, row in enumerate(order):
        axes = scale[row : row + 1], zero[row : row + 1], others[row]
        code = _codes(left[i : i + 1], axes, qmax)
        codes[row] = code[0]
        error = (left[i] - _value(code, axes)[0]) / u[i, i]
        left[i + 1 :] -= u[i, i + 1 :, None] * error
    return codes


def _inverse(x: F64) -> F64:
    """1 / x, and 0 for 0: an axis that fp16 rounds to nothing decodes to nothing."""
    return np.divide(1.0, x, out=np.zeros_like(x), where=x != 0)


def _codes(x: F64, axes: Axes, qmax: int) -> F64:
    """Nearest codes of a tile [R, C]; halves to even."""
    scale, zero, other = axes
    b = (x * _inverse(other) - zero[:, None]) * _inverse(scale)[:, None]
    return np.clip(np.rint(b), 0, qmax)


def _value(codes: F64, axes: Axes) -> F64:
    scale, zero, other = axes
    return (codes * scale[:, None] + zero[:, None]) * other


def clip(x: F64, axes: Axes, qmax: int) -> Axes:
    """Rows' ranges shrunk about their centres by the factor of least error (the first on a tie)."""
    scale, zero, other = axes
    half = scale * qmax / 2
    centre = zero + half
    best = (np.full(len(x), np.inf), scale, zero)
    for factor in SHRINK:
        s, z = scale * factor, centre - half * factor
        error = np.square(x - _value(_codes(x, (s, z, other), qmax), (s, z, other))).sum(1)
        less = error < best[0]
        best = tuple(np.where(less, a, b) for a, b in zip((error, s, z), best, strict=True))  # type: ignore[assignment]
    return best[1], best[2], other


def refit(x: F64, axes: Axes, qmax: int) -> Axes:
    """Least-squares (scale, zero) of every row for the codes at hand, then ``other``."""
    scale, zero, other = axes
    codes = _codes(x, axes, qmax)
    w, b = np.square(other), x * _inverse(other)
    total = w.sum()
    mean_q, mean_b = codes @ w / total, b @ w / total
    dq = codes - mean_q[:, None]
    var, cov = np.square(dq) @ w, (dq * (b - mean_b[:, None])) @ w
    s = np.divide(cov, var, out=np.zeros_like(cov), where=var > 1e-12)
    good = s > 1e-10
    scale = np.where(good, s, scale)
    zero = np.where(good, mean_b - scale * mean_q, zero)
    y = codes * scale[:, None] + zero[:, None]
    den, num = np.square(y).sum(0), (x * y).sum(0)
    t = np.divide(num, den, out=np.zeros_like(num), where=den > 1e-12)
    return scale, zero, np.where(t > 1e-8, t, other)


def half_axes(axes: Axes) -> tuple[Halves, Halves, Halves]:
    """The axes as a record holds them; always through float32, as the published ones."""
    f = [a.astype(np.float32) for a in axes]
    return reference._half_axes(f[0], f[1], f[2])


def _start(tile: Halves, bits: int) -> tuple[F64, Axes]:
    """The tile and the published axes, not yet rounded to fp16."""
    t = tile.astype(np.float32)
    bc, br = reference.normalise(t)
    _, scale, zero = reference.quantise(t, bc, br, bits)
    return t.astype(np.float64), tuple(a.astype(np.float64) for a in (scale, zero, bc))  # type: ignore[return-value]


def encode_v_tile(tile: Halves, bits: int, m: F64 | None) -> tuple[Bytes, Halves, Halves, Halves]:
    """fp16 ``[128 tokens, C]`` -> codes and fp16 axes; plain rounding without a metric."""
    qmax = (1 << bits) - 1
    x, axes = _start(tile, bits)
    axes = clip(x, axes, qmax)
    for _ in range(REFITS):
        axes = refit(x, axes, qmax)
    halves = half_axes(axes)
    scale, zero, other = (a.astype(np.float64) for a in halves)
    if m is None:
        return _codes(x, (scale, zero, other), qmax).astype(np.uint8), *halves
    others, order = np.broadcast_to(other, x.shape), np.argsort(-np.diag(m), kind="stable")
    u = feedback(m[np.ix_(order, order)], V_DAMPING)
    return rounded(x, scale, zero, others, u, order, qmax), *halves


def encode_k(
    rows: Halves, m: F64, bits: int, *, may_refit: bool
) -> list[tuple[Bytes, Halves, Halves, Halves]]:
    """fp16 stage rows ``[128, D]`` -> codes [width, 128] and fp16 axes of every slice.

    One recursion over all D channels, those first whose errors weigh most: M_ii times the mean
    square of a step.
    """
    qmax = (1 << bits) - 1
    head = HeadLayout(Side.K, bits, rows.shape[1])
    halves, parts = [], []
    for part in np.split(rows, head.n_slices, axis=1):
        x, axes = _start(np.ascontiguousarray(part.T), bits)
        if bits == 2 and may_refit:
            axes = refit(x, axes, qmax)
        halves.append(half_axes(axes))
        parts.append(x)
    x = np.concatenate(parts)
    scale, zero = (np.concatenate([h[i] for h in halves]).astype(np.float64) for i in (0, 1))
    others = np.repeat([h[2].astype(np.float64) for h in halves], len(parts[0]), axis=0)
    order = np.argsort(-np.diag(m) * np.square(scale) * np.square(others).sum(1), kind="stable")
    u = feedback(m[np.ix_(order, order)], K_DAMPING)
    codes = rounded(x, scale, zero, others, u, order, qmax)
    return [(c, *h) for c, h in zip(np.split(codes, head.n_slices), halves, strict=True)]


def encode(
    x: NDArray[Any],
    side: Side,
    bits: int,
    *,
    q: NDArray[Any] | None = None,
    keys: NDArray[Any] | None = None,
    scale: float | None = None,
    query_moment: F64 | None = None,
    may_refit: bool = True,
    rotated: bool = False,
    layout_id: str = LINE,
) -> Bytes:
    """One KV head of one group, ``[128, D]`` -> uint8 records, as ``reference.encode``.

    K needs the queries of the KV head's heads at the same tokens, ``q`` [heads, 128, D], or their
    ``query_moment`` [D, D] in the rotated domain. ``may_refit=False``: a sink token may be inside.
    V takes ``q``, the ``keys`` [128, D] of its rows and the ``scale`` of scores (1 / sqrt(D)) into
    account when they are given.
    """
    head = HeadLayout(side, bits, x.shape[-1])
    if x.shape != (GROUP, head.head_dim):
        raise InputError("x", found=x.shape, needed=f"({GROUP}, head_dim)")
    rows = reference.stage_rows(x, rotated=rotated)
    if side == Side.V:
        m = None
        if q is not None and keys is not None:
            queries, k = (reference.stage_rows(a, rotated=rotated) for a in (q, keys))
            m = attention_moment(queries, k, x.shape[1] ** -0.5 if scale is None else scale)
        tiles = [
            encode_v_tile(np.ascontiguousarray(p), bits, m)
            for p in np.split(rows, head.n_slices, axis=1)
        ]
    else:
        if query_moment is None:
            if q is None:
                raise InputError("q", found="nothing", needed="queries or query_moment for K")
            query_moment = moment(reference.stage_rows(q, rotated=rotated))
        tiles = encode_k(rows, query_moment, bits, may_refit=may_refit)
    return np.concatenate([join(*tile, head.record, layout_id) for tile in tiles])
