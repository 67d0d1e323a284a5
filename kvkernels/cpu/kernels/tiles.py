"""One tile of keys against all query rows of an item: sealed record, exact rows, and the softmax
between.

Rows are (query, head of the KV head), ``row = i * gqa + g``. Scores and probabilities are [rows,
128], outputs [rows, D], all float32 and flat.
"""

from numba import float32, int64

from kvkernels.cpu.columns import BODY, CHUNKED, CURRENT, F32, I8, I16, RING, SLIDING
from kvkernels.cpu.kernels.dot import call_dot
from kvkernels.cpu.kernels.jit import inner, kernel
from kvkernels.cpu.kernels.matrix import call_matrix
from kvkernels.cpu.kernels.quantise import fold_f32, fold_i8, fold_i16
from kvkernels.cpu.kernels.simd import (
    fma,
    hmax,
    hsum,
    load,
    load_half,
    prefetch,
    splat,
    store,
    vmax,
)
from kvkernels.cpu.kernels.softmax import MINUS_INF, decay, exponentials, prepare_row

GROUP = 128
# `shape`: geometry of the layer and how its kernels are called, int64
(
    N_HEAD,
    N_KV_HEAD,
    HEAD_DIM,
    DIM_V,
    SLICE,
    WINDOW,
    WINDOW_KIND,
    CAUSAL,
    EXACT_N,
    RECORDS,
    K_BYTES,
    V_BYTES,
    SLOTS,
    BLOCKS,
    K_MODE,
    V_MODE,
    K_KIND,
    V_KIND,
    RINGS,
    RING_ROWS,
    RING_SLOTS,
    RING_K,
    RING_V,
) = range(23)
# what `softmax_tile` says of a tile
NONE, SOME, EVERY = range(3)
# columns of `seqs`
Q_START, N_Q, N_PAST, TABLE_AT, TWIN_GROUP, MASK_AT, MASK_HEAD, MASK_ROW = range(8)


@kernel
def visible(shape, position, base, n, twin, source, cut):
    """[low, high) of the keys ``base .. base + n`` that the query at ``position`` sees in this
    source.

    Keys from ``cut`` on come from the ring of the tail (T6). Rows that exist both as record and as
    exact row (the twin group) are split by age: the newest ``exact_n`` come from the exact side. So
    each is scored once.
    """
    low, high = int64(0), int64(n)
    width = shape[WINDOW]
    if width > 0:
        if shape[WINDOW_KIND] == SLIDING:
            low = position - width + 1 - base
            if shape[CAUSAL] == 0:
                high = min(high, position + width - base)
        elif shape[WINDOW_KIND] == CHUNKED:
            low = position // width * width - base
        else:
            low = position - width // 2 - base
            high = min(high, position + width // 2 + 1 - base)
    if shape[CAUSAL] != 0:
        high = min(high, position + 1 - base)
    if source == RING:
        low = max(low, cut - base)
    elif source != CURRENT:
        high = min(high, cut - base)
    if twin:
        edge = position - shape[EXACT_N] + 1 - base
        if source == BODY:
            high = min(high, edge)
        else:
            low = max(low, edge)
    return max(low, int64(0)), high


@inner
def span(shape, position, queries, base, n, twin, source, cuts, cut_at):
    """Union over ``queries`` of what they see of a tile: rows outside are never read (B5)."""
    low, high = int64(n), int64(0)
    for i in range(queries):
        a, b = visible(shape, position + i, base, n, twin, source, cuts[cut_at + i])
        if a < b:
            low, high = min(low, a), max(high, b)
    return low, high


@inner
def block_of(rows_left):
    """(rows of the next micro-kernel pass, which of the three kernels that is)."""
    if rows_left >= 4:
        return int64(4), int64(0)
    if rows_left >= 2:
        return int64(2), int64(1)
    return int64(1), int64(2)


@inner
def times_codes(dots, mode, codes, at, w, act, scales, out, rows, n_out, n_red, ahead):
    """out[rows, n_out] = activations[rows, n_red] @ codes.T; float activations are in ``w``."""
    r = int64(0)
    while r < rows:
        size, which = block_of(rows - r)
        if mode == F32:
            call_dot(
                dots[which], codes, at, w, r * n_red, scales, int64(0), out, r * n_out, n_out,
                n_red, ahead,
            )  # fmt: skip
        else:
            row_bytes = n_red if mode == I8 else 2 * n_red
            scale_at = r * (n_red // 32) if mode == I8 else r
            call_dot(
                dots[which], codes, at, act, r * row_bytes, scales, scale_at, out, r * n_out,
                n_out, n_red, ahead,
            )  # fmt: skip
        r += size


@inner
def fold_row(mode, x, at, axes, n, gated, middle, r, w, act, scales):
    """Row ``r`` of the activations ``x * scale`` in the form of ``mode``;
    returns their constant part.
    """
    if mode == I8:
        return fold_i8(x, at, axes, n, gated, middle, act, r * n, scales, r * (n // 32))
    if mode == I16:
        return fold_i16(x, at, axes, n, gated, w, r * n, act, r * 2 * n, scales, r)
    return fold_f32(x, at, axes, n, gated, w, r * n)


@inner
def widen(halves, at, n, axes, ahead):
    """A record's axes as float32, once for all rows; ``ahead`` (in fp16) lie the next record's."""
    for i in range(0, n, 32):
        prefetch(halves, at + ahead + i)
    for i in range(0, n, 16):
        store(axes, i, load_half(halves, at + i))


@inner
def body_scores(
    q, shape, dots, middle, codes, halves, at, ahead, rows, axes, w, act, scales, tmp, zs, scores,
    tops,
):  # fmt: skip
    """scores[row, 128] of one sealed group and their largest, ``tops[row]``.

    ``at`` = byte offset of the group's K record(s) in ``codes``; ``halves`` is its uint16 view.
    """
    width, dim = shape[SLICE], shape[HEAD_DIM]
    for piece in range(dim // width):
        record = at + piece * shape[K_BYTES]
        n_axes = 2 * width + GROUP
        widen(halves, (record + shape[K_BYTES]) // 2 - n_axes, n_axes, axes, ahead // 2)
        for r in range(rows):
            zs[r] = fold_row(
                shape[K_MODE], q, r * dim + piece * width, axes, width, False, middle, r, w, act,
                scales,
            )  # fmt: skip
        times_codes(
            dots, shape[K_MODE], codes, record, w, act, scales, tmp, rows, GROUP, width, ahead
        )
        for r in range(rows):
            z, top = splat(zs[r]), splat(MINUS_INF)
            for t in range(0, GROUP, 16):
                s = (load(tmp, r * GROUP + t) + z) * load(axes, 2 * width + t)
                if piece > 0:
                    s = s + load(scores, r * GROUP + t)
                store(scores, r * GROUP + t, s)
                top = vmax(s, top)
            tops[r] = hmax(top)


@inner
def body_values(
    p, shape, dots, middle, codes, halves, at, ahead, rows, gated, axes, w, act, scales, tmp, zs,
    alpha, o,
):  # fmt: skip
    """o[row, D] = o * alpha + sum_t p[t] * value[t]; ``at`` = byte offset of the V record(s).

    ``gated``: some token is hidden from some row.
    """
    width, dim = shape[SLICE], shape[HEAD_DIM]
    for piece in range(dim // width):
        record = at + piece * shape[V_BYTES]
        n_axes = 2 * GROUP + width
        widen(halves, (record + shape[V_BYTES]) // 2 - n_axes, n_axes, axes, ahead // 2)
        for r in range(rows):
            zs[r] = fold_row(
                shape[V_MODE], p, r * GROUP, axes, int64(GROUP), gated, middle, r, w, act, scales
            )
        times_codes(
            dots, shape[V_MODE], codes, record, w, act, scales, tmp, rows, width, GROUP, ahead
        )
        for r in range(rows):
            z, a = splat(zs[r]), splat(alpha[r])
            for d in range(0, width, 16):
                x = load(axes, 2 * GROUP + d) * (load(tmp, r * width + d) + z)
                i = r * dim + piece * width + d
                store(o, i, fma(load(o, i), a, x))


@inner
def exact_scores(q, mats, k, k_at, unit, k_stride, dim, low, high, rows, scores):
    """scores[row, t] = q . k[:, t] for the tokens around [low, high), the rest 0; k is [D, tokens].

    ``unit``: elements of the array that make one of the matrix. Lanes of tokens outside hold
    garbage (even NaN) until they are hidden: lanes never mix.
    """
    begin, end = low // 64 * 64, (high + 63) // 64 * 64
    r = int64(0)
    while r < rows:
        size, which = block_of(rows - r)
        call_matrix(
            mats[which], k, k_at + begin * unit, q, r * dim, scores, r * GROUP + begin,
            end - begin, dim, k_stride, dim, GROUP,
        )  # fmt: skip
        r += size
    for r in range(rows):
        for t in range(0, begin, 16):
            store(scores, r * GROUP + t, splat(float32(0.0)))
        for t in range(end, GROUP, 16):
            store(scores, r * GROUP + t, splat(float32(0.0)))


@inner
def row_scores(q, k, at, stride, dim, n, rows, scores):
    """scores[row, t] = q . k[t] for t < n, the rest 0; k rows lie ``stride`` apart. For few tokens,
    whose rows are not worth transposing.
    """
    for r in range(rows):
        for t in range(0, GROUP, 16):
            store(scores, r * GROUP + t, splat(float32(0.0)))
        for t in range(n):
            total = splat(float32(0.0))
            for d in range(0, dim, 16):
                total = fma(load(q, r * dim + d), load(k, at + t * stride + d), total)
            scores[r * GROUP + t] = hsum(total)


@inner
def exact_values(p, mats, v, v_at, unit, v_stride, dim, low, high, rows, tmp, alpha, o):
    """o[row] = o[row] * alpha + sum over t in [low, high) of p[t] * v[t]; v is [tokens, D]."""
    r = int64(0)
    while r < rows:
        size, which = block_of(rows - r)
        call_matrix(
            mats[which], v, v_at + low * v_stride * unit, p, r * GROUP + low, tmp, r * dim, dim,
            high - low, v_stride, GROUP, dim,
        )  # fmt: skip
        r += size
    for r in range(rows):
        a = splat(alpha[r])
        for d in range(0, dim, 16):
            i = r * dim + d
            store(o, i, fma(load(o, i), a, load(tmp, i)))


@inner
def softmax_tile(
    shape, seqs, s, h, first, queries, base, n, twin, source, cuts, cap, slopes, mask, scores,
    tops, known, m, lsum, alpha,
):  # fmt: skip
    """Hide and exponentiate one tile for every row of ``queries`` from ``first`` on.

    ``tops``: the largest score of every row, when ``known``. Returns NONE when no row
    sees any of the tile, EVERY when every row sees all of it, else SOME; a row that sees none of it
    keeps probabilities of exactly 0.
    """
    gqa = shape[N_HEAD] // shape[N_KV_HEAD]
    some, every = False, True
    for i in range(queries):
        position = seqs[s, N_PAST] + first + i
        cut = cuts[seqs[s, Q_START] + first + i]
        low, high = visible(shape, position, base, n, twin, source, cut)
        whole = low <= 0 and high >= GROUP
        for g in range(gqa):
            r, head = i * gqa + g, h * gqa + g
            mask_at = int64(-1)
            if seqs[s, MASK_AT] >= 0:
                row = head * seqs[s, MASK_HEAD] + (first + i) * seqs[s, MASK_ROW]
                mask_at = seqs[s, MASK_AT] + row + base
            slope, top = slopes[head], tops[r]
            as_is = known and whole and mask_at < 0
            if not as_is or cap > float32(0.0) or slope != float32(0.0):
                top = prepare_row(
                    scores, r * GROUP, GROUP, low, high, cap, slope, base - position, mask, mask_at
                )
            every = every and whole and mask_at < 0
            alpha[r] = float32(1.0)
            if top == MINUS_INF:
                for t in range(0, GROUP, 16):
                    store(scores, r * GROUP + t, splat(float32(0.0)))
                continue
            some = True
            if top > m[r]:
                alpha[r] = decay(m[r], top)
                m[r] = top
            lsum[r] = lsum[r] * alpha[r] + exponentials(scores, r * GROUP, GROUP, m[r])
    if not some:
        return NONE
    return EVERY if every else SOME
