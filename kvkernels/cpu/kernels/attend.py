"""Decode attention straight from records: work items, each one KV head of one sequence over part of
its keys.

An item is (sequence, KV head, kind, first, last, part): kind BODY walks sealed groups
``first..last`` through the group table, EXACT walks tiles of fp16 rows (sinks, previous and open
group), CURRENT the step's own rows. Every item writes a partial result (maximum, sum, weighted
values) to slot ``part``; ``merge`` joins them by (max, sum) in a fixed order, so the bits do not
depend on the thread count. Query rows of an item are (query, head of the KV head), ``row = i * gqa
+ g``.
"""

import numpy as np
from numba import float32, int64

from kvkernels.cpu.kernels.dot import call_dot
from kvkernels.cpu.kernels.jit import kernel
from kvkernels.cpu.kernels.simd import (
    fma,
    hsum,
    load,
    load_half,
    splat,
    store,
    zero_unless_positive,
)
from kvkernels.cpu.kernels.softmax import MINUS_INF, decay, exponentials, prepare_row

GROUP = 128
BODY, EXACT, CURRENT = 0, 1, 2
# columns of `seqs`
Q_START, N_Q, N_PAST, TABLE_AT, TWIN_GROUP, MASK_AT, MASK_HEAD, MASK_ROW = range(8)
# columns of `items` and `tiles`
SEQ, HEAD, KIND, FIRST, LAST, PART = range(6)
BLOCK, BASE, ROWS, IS_TWIN = range(4)
# `shape`: geometry of the layer, int64
(
    N_HEAD,
    N_KV_HEAD,
    HEAD_DIM,
    SLICE,
    WINDOW,
    EXACT_N,
    CAUSAL,
    K_BYTES,
    V_BYTES,
    K_STRIDE,
    V_STRIDE,
    EXACT_STRIDE,
) = range(12)


@kernel
def visible(shape, position, base, n, twin, body):
    """[low, high) of the keys ``base .. base + n`` that the query at ``position`` sees in this
    source.

    Rows that exist both as record and as exact row (the twin group) are split by age, so that each
    is scored once: the newest ``exact_n`` come from the exact side (T6).
    """
    low, high = int64(0), int64(n)
    if shape[WINDOW] > 0:
        low = max(low, position - shape[WINDOW] + 1 - base)
        if shape[CAUSAL] == 0:
            high = min(high, position + shape[WINDOW] - base)
    if shape[CAUSAL] != 0:
        high = min(high, position + 1 - base)
    if twin:
        edge = position - shape[EXACT_N] + 1 - base
        if body:
            high = min(high, edge)
        else:
            low = max(low, edge)
    return low, high


@kernel
def matmul_codes(dots, codes, at, act, out, rows, n_out, n_red):
    """out[rows, n_out] = act[rows, n_red] @ codes.T, in blocks of 4, 2 and 1 rows."""
    r = int64(0)
    while r < rows:
        left = rows - r
        size = int64(4) if left >= 4 else (int64(2) if left >= 2 else int64(1))
        address = dots[0] if size == 4 else (dots[1] if size == 2 else dots[2])
        call_dot(address, codes, at, act, r * n_red, out, r * n_out, n_out, n_red, n_red, n_out)
        r += size


@kernel
def fold(q, q_at, axes, scale_at, zero_at, n, act, act_at):
    """act = q * scale per channel; returns sum(q * zero) (codec.md 6)."""
    z = splat(float32(0.0))
    for d in range(0, n, 16):
        x = load(q, q_at + d)
        store(act, act_at + d, x * load_half(axes, scale_at + d))
        z = fma(x, load_half(axes, zero_at + d), z)
    return hsum(z)


@kernel
def body_scores(q, shape, dots, codes, axes, at, rows, act, tmp, zs, scores):
    """scores[row, 128] of one sealed group; ``at`` = byte offset of its K record(s)."""
    width, dim = shape[SLICE], shape[HEAD_DIM]
    for piece in range(dim // width):
        record = at + piece * shape[K_BYTES]
        scale_at = (record + shape[K_BYTES]) // 2 - 2 * width - GROUP
        for r in range(rows):
            zs[r] = fold(
                q, r * dim + piece * width, axes, scale_at, scale_at + width, width, act, r * width
            )
        matmul_codes(dots, codes, record, act, tmp, rows, GROUP, width)
        other_at = scale_at + 2 * width
        for r in range(rows):
            z = splat(zs[r])
            for t in range(0, GROUP, 16):
                s = (load(tmp, r * GROUP + t) + z) * load_half(axes, other_at + t)
                if piece > 0:
                    s = s + load(scores, r * GROUP + t)
                store(scores, r * GROUP + t, s)


@kernel
def body_values(p, shape, dots, codes, axes, at, rows, act, tmp, zs, alpha, o):
    """o[row, D] = o * alpha + sum_t p[t] * value[t]; ``at`` = byte offset of the V record(s)."""
    width, dim = shape[SLICE], shape[HEAD_DIM]
    for piece in range(dim // width):
        record = at + piece * shape[V_BYTES]
        scale_at = (record + shape[V_BYTES]) // 2 - 2 * GROUP - width
        for r in range(rows):
            z = splat(float32(0.0))
            for t in range(0, GROUP, 16):
                x = load(p, r * GROUP + t)
                # A token nobody sees has p = 0; its axes must not turn 0 into NaN (B5).
                w = zero_unless_positive(x * load_half(axes, scale_at + t), x)
                store(act, r * GROUP + t, w)
                z = z + zero_unless_positive(x * load_half(axes, scale_at + GROUP + t), x)
            zs[r] = hsum(z)
        matmul_codes(dots, codes, record, act, tmp, rows, width, GROUP)
        other_at = scale_at + 2 * GROUP
        for r in range(rows):
            z, a = splat(zs[r]), splat(alpha[r])
            for d in range(0, width, 16):
                x = load_half(axes, other_at + d) * (load(tmp, r * width + d) + z)
                i = r * dim + piece * width + d
                store(o, i, fma(load(o, i), a, x))


@kernel
def exact_scores(q, dim, k, k_at, k_stride, low, high, rows, scores):
    """scores[row, t] = q . k[t] for t in [low, high); other entries become 0 and stay hidden."""
    for r in range(rows):
        for t in range(GROUP):
            if t < low or t >= high:
                scores[r * GROUP + t] = float32(0.0)
                continue
            total = splat(float32(0.0))
            for d in range(0, dim, 16):
                total = fma(load(q, r * dim + d), load(k, k_at + t * k_stride + d), total)
            scores[r * GROUP + t] = hsum(total)


@kernel
def exact_values(p, dim, v, v_at, v_stride, low, high, rows, alpha, o):
    """o[row] = o[row] * alpha + sum over t in [low, high) of p[t] * v[t]."""
    for r in range(rows):
        a = splat(alpha[r])
        for d in range(0, dim, 32):
            i = r * dim + d
            x0, x1 = load(o, i) * a, load(o, i + 16) * a
            for t in range(low, high):
                w = splat(p[r * GROUP + t])
                j = v_at + t * v_stride + d
                x0 = fma(w, load(v, j), x0)
                x1 = fma(w, load(v, j + 16), x1)
            store(o, i, x0)
            store(o, i + 16, x1)


@kernel
def softmax_tile(shape, seqs, s, h, base, n, twin, body, cap, slopes, mask, scores, m, lsum, alpha):
    """Mask and exponentiate one tile for every row; returns False when no row sees any of it."""
    gqa = shape[N_HEAD] // shape[N_KV_HEAD]
    seen = False
    for i in range(seqs[s, N_Q]):
        position = seqs[s, N_PAST] + i
        low, high = visible(shape, position, base, n, twin, body)
        for g in range(gqa):
            r, head = i * gqa + g, h * gqa + g
            mask_at = int64(-1)
            if seqs[s, MASK_AT] >= 0:
                mask_at = (
                    seqs[s, MASK_AT] + head * seqs[s, MASK_HEAD] + i * seqs[s, MASK_ROW] + base
                )
            top = prepare_row(
                scores, r * GROUP, GROUP, low, high, cap, slopes[head], base - position,
                mask, mask_at,
            )  # fmt: skip
            alpha[r] = float32(1.0)
            if top == MINUS_INF:
                for t in range(GROUP):
                    scores[r * GROUP + t] = float32(0.0)
                continue
            seen = True
            if top > m[r]:
                alpha[r] = decay(m[r], top)
                m[r] = top
            lsum[r] = lsum[r] * alpha[r] + exponentials(scores, r * GROUP, GROUP, m[r])
    return seen


@kernel
def run_items(
    start, stop, items, seqs, tiles, table, shape, dots_k, dots_v, q_rotated, q_plain, scale, cap,
    slopes, mask, k_codes, k_axes, v_codes, v_axes, k_exact, v_exact, k_new, v_new, pm, pl, po,
):  # fmt: skip
    """Compute items ``start..stop``.

    q_*: float32 [T, n_head, D] flat; k_codes / v_codes: uint8 record pools [n_kv_head, slots,
    bytes] flat, with their uint16 views k_axes / v_axes; k_exact / v_exact: uint16 [n_kv_head,
    blocks, 128, D] flat, rotated; k_new / v_new: float32 [T, n_kv_head, D] flat, un-rotated; pm,
    pl: float32 [parts, rows]; po: [parts, rows * D].
    """
    dim, n_head, n_kv_head = shape[HEAD_DIM], shape[N_HEAD], shape[N_KV_HEAD]
    gqa, max_rows = n_head // n_kv_head, pm.shape[1]
    wide = max(GROUP, shape[SLICE])
    q = np.empty(max_rows * dim, np.float32)
    act = np.empty(max_rows * wide, np.float32)
    tmp = np.empty(max_rows * wide, np.float32)
    scores = np.empty(max_rows * GROUP, np.float32)
    zs = np.empty(max_rows, np.float32)
    alpha = np.empty(max_rows, np.float32)
    kf = np.empty(GROUP * dim, np.float32)
    vf = np.empty(GROUP * dim, np.float32)
    for it in range(start, stop):
        s, h, kind, part = items[it, SEQ], items[it, HEAD], items[it, KIND], items[it, PART]
        n_q = seqs[s, N_Q]
        rows = n_q * gqa
        m, lsum, o = pm[part], pl[part], po[part]
        m[:rows] = MINUS_INF
        lsum[:rows] = float32(0.0)
        o[: rows * dim] = float32(0.0)
        source = q_plain if kind == CURRENT else q_rotated
        for i in range(n_q):
            at = ((seqs[s, Q_START] + i) * n_head + h * gqa) * dim
            for d in range(0, gqa * dim, 16):
                store(q, i * gqa * dim + d, load(source, at + d) * splat(scale))
        for index in range(items[it, FIRST], items[it, LAST]):
            if kind == BODY:
                base, n = index * GROUP, int64(GROUP)
                twin = index == seqs[s, TWIN_GROUP]
                slot = table[seqs[s, TABLE_AT] + index]
                at = (h * shape[K_STRIDE] + slot) * shape[K_BYTES] * (dim // shape[SLICE])
                body_scores(q, shape, dots_k, k_codes, k_axes, at, rows, act, tmp, zs, scores)
                if softmax_tile(shape, seqs, s, h, base, n, twin, True, cap, slopes, mask, scores,
                                m, lsum, alpha):  # fmt: skip
                    at = (h * shape[V_STRIDE] + slot) * shape[V_BYTES] * (dim // shape[SLICE])
                    body_values(
                        scores, shape, dots_v, v_codes, v_axes, at, rows, act, tmp, zs, alpha, o
                    )
                continue
            if kind == EXACT:
                base, n, twin = tiles[index, BASE], tiles[index, ROWS], tiles[index, IS_TWIN] != 0
                at = (h * shape[EXACT_STRIDE] + tiles[index, BLOCK]) * GROUP * dim
                for d in range(0, n * dim, 16):
                    store(kf, d, load_half(k_exact, at + d))
                    store(vf, d, load_half(v_exact, at + d))
                k, v, k_at, stride = kf, vf, int64(0), dim
            else:
                base, n, twin = seqs[s, N_PAST], n_q, False
                k, v, stride = k_new, v_new, n_kv_head * dim
                k_at = (seqs[s, Q_START] * n_kv_head + h) * dim
            low, high = tile_span(shape, seqs, s, base, n, twin)
            if low >= high:
                continue
            exact_scores(q, dim, k, k_at, stride, low, high, rows, scores)
            if softmax_tile(shape, seqs, s, h, base, n, twin, False, cap, slopes, mask, scores,
                            m, lsum, alpha):  # fmt: skip
                exact_values(scores, dim, v, k_at, stride, low, high, rows, alpha, o)


@kernel
def tile_span(shape, seqs, s, base, n, twin):
    """Union over the queries of what they see of an exact tile:
    rows outside are never read (B5).
    """
    low, high = int64(n), int64(0)
    for i in range(seqs[s, N_Q]):
        a, b = visible(shape, seqs[s, N_PAST] + i, base, n, twin, False)
        low, high = min(low, max(a, 0)), max(high, b)
    return low, high
