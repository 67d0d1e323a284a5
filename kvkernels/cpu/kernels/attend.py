"""Attention straight from records: work items, each some queries of one KV head over some of its
keys.

An item is (sequence, KV head, kind, first, last, part, first query, queries). BODY walks sealed
groups ``first .. last`` through the group table, EXACT walks tiles of fp16 rows (sinks, previous
and open group), CURRENT the step's own rows; these three are for decodes, where a few queries meet
many keys and the keys are split. ALL does everything for one block of queries of a prefill. Every
item writes a partial result (maximum, sum, weighted values) to slot ``part``; ``merge.merge`` joins
them in a fixed order, so the bits do not depend on the thread count.
"""

import numpy as np
from numba import float32, int64

from kvkernels.cpu.columns import ALL, BODY, CURRENT, EXACT
from kvkernels.cpu.kernels.finish import finish_row
from kvkernels.cpu.kernels.jit import inner, kernel
from kvkernels.cpu.kernels.rotate import rotate_row
from kvkernels.cpu.kernels.simd import load, splat, store
from kvkernels.cpu.kernels.softmax import MINUS_INF
from kvkernels.cpu.kernels.tiles import (
    BLOCKS,
    GROUP,
    HEAD_DIM,
    K_BYTES,
    N_HEAD,
    N_KV_HEAD,
    N_PAST,
    N_Q,
    NONE,
    Q_START,
    SLICE,
    SLOTS,
    SOME,
    TABLE_AT,
    TWIN_GROUP,
    V_BYTES,
    body_scores,
    body_values,
    exact_scores,
    exact_values,
    row_scores,
    softmax_tile,
    span,
)

# columns of `items` and `tiles`
SEQ, HEAD, KIND, FIRST, LAST, PART, Q_FIRST, QUERIES = range(8)
BLOCK, BASE, ROWS, IS_TWIN = range(4)
# columns of `seqs` beyond those of tiles.py
TILE_FIRST, TILE_LAST = 8, 9


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


@kernel
def run_items(
    start, stop,
    shape, dots_k, dots_v, middles, mats, scale, cap, slopes, k_codes, k_axes, v_codes, v_axes,
    k_exact, v_exact,
    items, tiles, table,
    seqs, mask, queries_in, k_new, k_new_stride, v_new,
    pm, pl, po, sink_logits, has_sinks, out, lse,
):  # fmt: skip
    """Compute items ``start .. stop``.

    queries_in: float32 [T, n_head, D] flat; k_codes / v_codes: uint8 record pools [n_kv_head,
    slots, bytes] flat, with their uint16 views k_axes / v_axes; k_exact: uint16 [n_kv_head, blocks,
    D, 128] flat, v_exact the same as [.., 128, D], both rotated; k_new, v_new: float32 [T,
    n_kv_head, D] flat, both un-rotated, but for items of kind ALL k_new is [n_kv_head, D,
    k_new_stride]; k_new_stride 0 says that there are none; mats: addresses of the fp16
    and float32 matrix kernels; pm, pl: float32 [parts, rows]; po: [parts, rows * D].
    """
    dim, n_head, n_kv_head = shape[HEAD_DIM], shape[N_HEAD], shape[N_KV_HEAD]
    gqa, max_rows = n_head // n_kv_head, pm.shape[1]
    wide, slices = max(GROUP, dim), dim // shape[SLICE]
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
    own_m = np.empty(max_rows, np.float32)
    own_sum = np.empty(max_rows, np.float32)
    own_o = np.empty(max_rows * dim, np.float32)
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
        for d in range(0, rows * dim, 16):
            store(o, d, splat(float32(0.0)))
        q_at = ((seqs[s, Q_START] + first) * n_head + h * gqa) * dim
        last_phase = CURRENT if kind == ALL else kind
        for phase in range(BODY if kind == ALL else kind, last_phase + 1):
            begin, end, stride = int64(0), int64(0), dim
            if phase == BODY:
                begin, end = items[it, FIRST], items[it, LAST]
            elif phase == EXACT:
                begin, end = seqs[s, TILE_FIRST], seqs[s, TILE_LAST]
            elif k_new_stride > 0:
                end = (seqs[s, N_Q] + GROUP - 1) // GROUP
            if phase == CURRENT and kind == ALL:
                # What comes now is un-rotated; the sums so far are rotated back (they are linear).
                rotate_all(o, rows, dim, tmp)
            if phase in (CURRENT, BODY) or kind == EXACT:
                take_queries(queries_in, q_at, n_head, gqa, queries, dim, scale, q)
                if phase != CURRENT:
                    rotate_all(q, rows, dim, tmp)
            for index in range(begin, end):
                # One softmax for every source: which keys these are, scores, softmax, values.
                base, n, twin = index * GROUP, int64(GROUP), False
                at, ahead = int64(0), int64(0)
                if phase == BODY:
                    twin = index == seqs[s, TWIN_GROUP]
                    slot = table[seqs[s, TABLE_AT] + index]
                    at = (h * shape[SLOTS] + slot) * slices
                    # While this group is worked on, the next one's records come from memory.
                    if index + 1 < end:
                        ahead = (table[seqs[s, TABLE_AT] + index + 1] - slot) * slices
                elif phase == EXACT:
                    base, n, twin = (
                        tiles[index, BASE],
                        tiles[index, ROWS],
                        tiles[index, IS_TWIN] != 0,
                    )
                    at = (h * shape[BLOCKS] + tiles[index, BLOCK]) * GROUP * dim
                else:
                    base, n = seqs[s, N_PAST] + base, min(n, seqs[s, N_Q] - base)
                    at = seqs[s, Q_START] + index * GROUP
                    stride = n_kv_head * dim
                low, high = span(shape, position, queries, base, n, twin, phase == BODY)
                if low >= high:
                    continue
                if phase == BODY:
                    body_scores(
                        q, shape, dots_k, middles[0], k_codes, k_axes, at * shape[K_BYTES],
                        ahead * shape[K_BYTES], rows, axes, w, act, scales, tmp, zs, scores, tops,
                    )  # fmt: skip
                elif phase == EXACT:
                    exact_scores(q, mats, k_exact, at, int64(GROUP), dim, low, high, rows, scores)
                elif kind == ALL:
                    k_at = h * dim * k_new_stride + at
                    exact_scores(
                        q, mats[3:], k_new, k_at, k_new_stride, dim, low, high, rows, scores
                    )
                else:
                    k_at = (at * n_kv_head + h) * dim
                    row_scores(q, k_new, k_at, stride, dim, n, rows, scores)
                seen = softmax_tile(
                    shape, seqs, s, h, first, queries, base, n, twin, phase == BODY, cap, slopes,
                    mask, scores, tops, m, lsum, alpha,
                )  # fmt: skip
                if seen == NONE:
                    continue
                if phase == BODY:
                    body_values(
                        scores, shape, dots_v, middles[1], v_codes, v_axes, at * shape[V_BYTES],
                        ahead * shape[V_BYTES], rows, seen == SOME, axes, w, act, scales, tmp, zs,
                        alpha, o,
                    )  # fmt: skip
                elif phase == EXACT:
                    exact_values(
                        scores, mats, v_exact, at, stride, dim, low, high, rows, tmp, alpha, o
                    )
                else:
                    v_at = (at * n_kv_head + h) * dim
                    exact_values(
                        scores, mats[3:], v_new, v_at, stride, dim, low, high, rows, tmp, alpha, o
                    )
        if kind == ALL:
            row = (seqs[s, Q_START] + first) * n_head + h * gqa
            for i in range(rows):
                # Rows are (query, head of the KV head); the output is [T, n_head, D].
                finish_row(
                    o, i * dim, dim, m[i], lsum[i], sink_logits, has_sinks, h * gqa + i % gqa, out,
                    lse, row + i // gqa * n_head + i % gqa,
                )  # fmt: skip
