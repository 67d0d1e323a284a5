"""Attention straight from the cache: work items, each some queries of one KV head over some of its
keys.

An item is (sequence, KV head, kind, first, last, part, first query, queries). BODY walks sealed
groups ``first .. last`` through the group table, EXACT tiles of rotated fp16 rows (sinks, previous
and open group), TILES tiles of a standard type through the group table, RING runs of the precision
tail, CURRENT the step's own rows; these are for decodes, where a few queries meet many keys and the
keys are split. ALL does everything for one block of queries of a prefill. Every item writes a
partial result (maximum, sum, weighted values) to slot ``part``; ``merge.merge`` joins them in a
fixed order, so the bits do not depend on the thread count.
"""

import numpy as np
from numba import float32, int64

from kvkernels.cpu.columns import ALL, BODY, CURRENT, EXACT, RING, STANDARD, TILES
from kvkernels.cpu.kernels.finish import finish_row
from kvkernels.cpu.kernels.jit import inner, kernel
from kvkernels.cpu.kernels.rotate import rotate_row
from kvkernels.cpu.kernels.simd import load, splat, store
from kvkernels.cpu.kernels.softmax import MINUS_INF
from kvkernels.cpu.kernels.standard import standard_queries, standard_scores, standard_values
from kvkernels.cpu.kernels.tiles import (
    BLOCKS,
    DIM_V,
    GROUP,
    HEAD_DIM,
    K_BYTES,
    K_KIND,
    K_MODE,
    N_HEAD,
    N_KV_HEAD,
    N_PAST,
    N_Q,
    NONE,
    Q_START,
    RECORDS,
    RING_K,
    RING_ROWS,
    RING_SLOTS,
    RING_V,
    RINGS,
    SLICE,
    SLOTS,
    SOME,
    TABLE_AT,
    TWIN_GROUP,
    V_BYTES,
    V_KIND,
    V_MODE,
    body_scores,
    body_values,
    exact_scores,
    exact_values,
    row_scores,
    softmax_tile,
    span,
)

STANDARD_F32, STANDARD_F16, STANDARD_BF16 = (STANDARD[name] for name in ("f32", "f16", "bf16"))
# columns of `items`, `tiles` and `runs`
SEQ, HEAD, KIND, FIRST, LAST, PART, Q_FIRST, QUERIES = range(8)
BLOCK, BASE, ROWS, IS_TWIN = range(4)
SLOT, RUN_BASE, RUN_ROWS = range(3)
# columns of `seqs` beyond those of tiles.py
TILE_FIRST, TILE_LAST, RUN_FIRST, RUN_LAST, RING_ID = range(8, 13)


@inner
def take_queries(source, at, n_head, gqa, queries, dim, scale, q):
    """q[queries * gqa, D] = scale * rows of one KV head, from float32 [T, n_head, D]."""
    for i in range(queries):
        for d in range(0, gqa * dim, 16):
            x = load(source, at + i * n_head * dim + d)
            store(q, i * gqa * dim + d, x * splat(scale))


@inner
def rotate_all(x, rows, dim, tmp):
    """Rotate x [rows, D] in place; ``tmp`` is room for as much."""
    for d in range(0, rows * dim, 16):
        store(tmp, d, load(x, d))
    for r in range(rows):
        rotate_row(tmp[r * dim : (r + 1) * dim], x[r * dim : (r + 1) * dim], dim)


@inner
def words_of(kind):
    """uint16 words of one element of a float type."""
    return int64(2) if kind == STANDARD_F32 else int64(1)


@kernel
def run_items(
    start, stop,
    shape, dots_k, dots_v, middles, mats, scale, cap, slopes, k_codes, k_halves, v_codes, v_halves,
    k_exact, v_exact, k_ring, v_ring,
    items, tiles, runs, table,
    seqs, cuts, mask, queries_in, k_new, k_new_stride, v_new,
    pm, pl, po, sink_logits, has_sinks, out, lse,
):  # fmt: skip
    """Compute items ``start .. stop``.

    queries_in: float32 [T, n_head, D] flat; k_codes / v_codes: uint8 pools of records or tiles
    [n_kv_head, slots, bytes] flat, with their uint16 views k_halves / v_halves; k_exact: uint16
    [n_kv_head, blocks, D, 128] flat, v_exact the same as [.., 128, D], both rotated; k_ring: uint16
    [n_kv_head, rings, tiles, D, 128] flat, v_ring [n_kv_head, rings, rows, D_v], un-rotated; k_new,
    v_new: float32 [T, n_kv_head, D or D_v] flat, both un-rotated, but for items of kind ALL k_new
    is [n_kv_head, D, k_new_stride]; k_new_stride 0 says that there are none; mats: addresses of the
    matrix kernels by element kind; cuts [T]: the oldest key a query takes from the ring; pm, pl:
    float32 [parts, rows]; po: [parts, rows * D_v].
    """
    dim, dim_v = shape[HEAD_DIM], shape[DIM_V]
    n_head, n_kv_head = shape[N_HEAD], shape[N_KV_HEAD]
    gqa, max_rows = n_head // n_kv_head, pm.shape[1]
    wide, slices = max(GROUP, dim, dim_v), dim // shape[SLICE]
    records = shape[RECORDS] != 0
    q = np.empty(max_rows * dim, np.float32)
    w = np.empty(max_rows * GROUP, np.float32)
    act = np.empty(max_rows * GROUP * 2, np.uint8)
    scales = np.empty(max_rows * 4, np.float32)
    tmp = np.empty(max_rows * wide, np.float32)
    scores = np.empty(max_rows * GROUP, np.float32)
    zs = np.empty(max_rows, np.float32)
    tops = np.empty(max_rows, np.float32)
    axes = np.empty(3 * GROUP, np.float32)
    alpha = np.empty(max_rows, np.float32)
    # Activations of the queries for tiles of a standard type: the same for every tile of an item.
    many = 0 if records else max_rows * dim
    qw = np.empty(many, np.float32)
    qact = np.empty(2 * many, np.uint8)
    qscales = np.empty(many // 32, np.float32)
    qsums = np.empty(many // 16, np.float32)
    own_m = np.empty(max_rows, np.float32)
    own_sum = np.empty(max_rows, np.float32)
    own_o = np.empty(max_rows * dim_v, np.float32)
    for it in range(start, stop):
        s, h, kind, part = items[it, SEQ], items[it, HEAD], items[it, KIND], items[it, PART]
        first, queries = items[it, Q_FIRST], items[it, QUERIES]
        rows, position = queries * gqa, seqs[s, N_PAST] + first
        # A prefill block is finished here; a decode item leaves its part to the merge.
        m, lsum, o = own_m, own_sum, own_o
        if kind != ALL:
            m, lsum, o = pm[part], pl[part], po[part]
        # Loops and not slice assignments: Numba compiles a shape-error message for each of those.
        for r in range(rows):
            m[r], lsum[r] = MINUS_INF, float32(0.0)
        for d in range(0, rows * dim_v, 16):
            store(o, d, splat(float32(0.0)))
        q_at = ((seqs[s, Q_START] + first) * n_head + h * gqa) * dim
        phase = int64(kind)
        if kind == ALL:
            phase = int64(BODY) if records else int64(TILES)
        last_phase = int64(CURRENT) if kind == ALL else int64(kind)
        take_queries(queries_in, q_at, n_head, gqa, queries, dim, scale, q)
        if phase < TILES:
            rotate_all(q, rows, dim, tmp)
        while phase <= last_phase:
            begin, end = int64(0), int64(0)
            kind_k = kind_v = int64(STANDARD_F16)
            if phase == BODY or (phase == TILES and not records):
                begin, end = items[it, FIRST], items[it, LAST]
                kind_k, kind_v = shape[K_KIND], shape[V_KIND]
            elif phase == EXACT:
                begin, end = seqs[s, TILE_FIRST], seqs[s, TILE_LAST]
            elif phase == RING:
                kind_k, kind_v = shape[RING_K], shape[RING_V]
                begin, end = seqs[s, RUN_FIRST], seqs[s, RUN_LAST]
                if kind == RING:
                    begin, end = items[it, FIRST], items[it, LAST]
            elif phase == CURRENT and k_new_stride > 0:
                kind_k = kind_v = int64(STANDARD_F32)
                end = (seqs[s, N_Q] + GROUP - 1) // GROUP
            if phase == TILES:
                if records:
                    # What comes now is un-rotated; the sums so far are rotated back (linear).
                    rotate_all(o, rows, dim, tmp)
                    take_queries(queries_in, q_at, n_head, gqa, queries, dim, scale, q)
                elif kind_k > STANDARD_BF16 and begin < end:
                    standard_queries(q, kind_k, shape[K_MODE], dim, rows, qw, qact, qscales, qsums)
            for index in range(begin, end):
                # One softmax for every source: which keys these are, scores, softmax, values.
                base, n, twin = index * GROUP, int64(GROUP), False
                at, ahead = int64(0), int64(0)
                if phase in (BODY, TILES):
                    slot = table[seqs[s, TABLE_AT] + index]
                    # While this group is worked on, the next one's bytes come from memory.
                    if index + 1 < end:
                        ahead = int64(table[seqs[s, TABLE_AT] + index + 1] - slot)
                    at = h * shape[SLOTS] + slot
                    if phase == BODY:
                        twin = index == seqs[s, TWIN_GROUP]
                        at, ahead = at * slices, ahead * slices
                    else:
                        n = min(n, seqs[s, N_PAST] - base)
                elif phase == EXACT:
                    base, n, twin = (
                        tiles[index, BASE],
                        tiles[index, ROWS],
                        tiles[index, IS_TWIN] != 0,
                    )
                    at = (h * shape[BLOCKS] + tiles[index, BLOCK]) * GROUP * dim
                elif phase == RING:
                    base, n = runs[index, RUN_BASE], runs[index, RUN_ROWS]
                    at = h * shape[RINGS] + seqs[s, RING_ID]
                else:
                    base, n = seqs[s, N_PAST] + base, min(n, seqs[s, N_Q] - base)
                    at = seqs[s, Q_START] + index * GROUP
                cut_at = seqs[s, Q_START] + first
                low, high = span(shape, position, queries, base, n, twin, phase, cuts, cut_at)
                if low >= high:
                    continue
                k_at, v_at = at * shape[K_BYTES], at * shape[V_BYTES]
                known = True
                if phase == BODY:
                    body_scores(
                        q, shape, dots_k, middles[0], k_codes, k_halves, k_at,
                        ahead * shape[K_BYTES], rows, axes, w, act, scales, tmp, zs, scores, tops,
                    )  # fmt: skip
                elif phase == TILES and kind_k > STANDARD_BF16:
                    standard_scores(
                        kind_k, shape[K_MODE], dots_k, k_codes, k_halves, k_at,
                        ahead * shape[K_BYTES], dim, rows, qw, qact, qscales, qsums, tmp, scores,
                        tops,
                    )  # fmt: skip
                elif phase == CURRENT and kind != ALL:
                    known = False
                    row_scores(
                        q, k_new, (at * n_kv_head + h) * dim, n_kv_head * dim, dim, n, rows, scores
                    )
                elif phase == CURRENT:
                    known = False
                    exact_scores(
                        q, mats, k_new, h * dim * k_new_stride + at, int64(1), k_new_stride, dim,
                        low, high, rows, scores,
                    )  # fmt: skip
                else:
                    known = False
                    # Exact rows lie [D, tokens]: blocks and tiles of 128, a ring.
                    halves, offset, stride = k_exact, at, int64(GROUP)
                    if phase == TILES:
                        halves, offset = k_halves, k_at // 2
                    elif phase == RING:
                        halves, slot = k_ring, runs[index, SLOT]
                        stride = min(stride, shape[RING_SLOTS] - slot)
                        offset = (at * shape[RING_SLOTS] + slot) * dim * words_of(kind_k)
                    exact_scores(
                        q, mats[3 * kind_k :], halves, offset, words_of(kind_k), stride, dim, low,
                        high, rows, scores,
                    )  # fmt: skip
                seen = softmax_tile(
                    shape, seqs, s, h, first, queries, base, n, twin, phase, cuts, cap, slopes,
                    mask, scores, tops, known, m, lsum, alpha,
                )  # fmt: skip
                if seen == NONE:
                    continue
                if phase == BODY:
                    body_values(
                        scores, shape, dots_v, middles[1], v_codes, v_halves, v_at,
                        ahead * shape[V_BYTES], rows, seen == SOME, axes, w, act, scales, tmp, zs,
                        alpha, o,
                    )  # fmt: skip
                elif phase == TILES and kind_v > STANDARD_BF16:
                    standard_values(
                        scores, kind_v, shape[V_MODE], dots_v, v_codes, v_halves, v_at,
                        ahead * shape[V_BYTES], dim_v, rows, seen == SOME, axes, w, act, scales,
                        tmp, zs, alpha, o,
                    )  # fmt: skip
                elif phase == CURRENT:
                    exact_values(
                        scores, mats, v_new, (at * n_kv_head + h) * dim_v, int64(1),
                        n_kv_head * dim_v, dim_v, low, high, rows, tmp, alpha, o,
                    )  # fmt: skip
                else:
                    halves, offset, stride = v_exact, at, dim_v
                    if phase == TILES:
                        halves, offset, stride = v_halves, v_at // 2, (dim_v + 63) // 64 * 64
                    elif phase == RING:
                        halves = v_ring
                        offset = (at * shape[RING_ROWS] + runs[index, SLOT]) * dim_v
                        offset *= words_of(kind_v)
                    exact_values(
                        scores, mats[3 * kind_v :], halves, offset, words_of(kind_v), stride,
                        dim_v, low, high, rows, tmp, alpha, o,
                    )  # fmt: skip
            phase += 1
        if kind == ALL:
            row = (seqs[s, Q_START] + first) * n_head + h * gqa
            for i in range(rows):
                # Rows are (query, head of the KV head); the output is [T, n_head, D_v].
                finish_row(
                    o, i * dim_v, dim_v, m[i], lsum[i], sink_logits, has_sinks, h * gqa + i % gqa,
                    out, lse, row + i // gqa * n_head + i % gqa,
                )  # fmt: skip
