"""One tile of keys and values of a standard cache type against all query rows of an item.

A tile is 128 tokens of one KV head and one side (``kvkernels.quants.tiles``): per block of 32
channels a line tile of codes, then a scale, and a minimum in some types, for every token of every
block. A value is ``code * scale + minimum``, or ``(code - middle) * scale`` without minima.

Nothing is rotated, and of K nothing is folded: the scale belongs to the output, so the queries'
activations serve every tile of an item. ``kind`` is a quantised one of ``columns.STANDARD``; the
float ones go through ``exact_scores`` and ``exact_values`` of ``tiles.py``. Rows, scores and modes
are those of ``tiles.py``.
"""

from numba import float32, int64

from kvkernels.cpu.columns import F32, I8, STANDARD
from kvkernels.cpu.kernels.dot import call_dot
from kvkernels.cpu.kernels.jit import inner
from kvkernels.cpu.kernels.quantise import activation_scale
from kvkernels.cpu.kernels.simd import (
    fma,
    hmax,
    hsum,
    load,
    load_half,
    prefetch,
    round_scaled,
    round_up_byte,
    splat,
    store,
    store_bytes,
    vabs,
    vmax,
)
from kvkernels.cpu.kernels.softmax import MINUS_INF
from kvkernels.cpu.kernels.tiles import GROUP, block_of, fold_row, times_codes

BLOCK = 32
FLOAT32, BF16 = STANDARD["f32"], STANDARD["bf16"]
Q8_0, Q5_1, Q5_0, Q4_1 = (STANDARD[name] for name in ("q8_0", "q5_1", "q5_0", "q4_1"))


@inner
def bits_of(kind):
    """Bits of a code; 0 for the float types."""
    if kind < Q8_0:
        return int64(0)
    if kind == Q8_0:
        return int64(8)
    return int64(5) if kind <= Q5_0 else int64(4)


@inner
def has_minimum(kind):
    """Whether values are ``code * scale + minimum``."""
    return kind in (Q5_1, Q4_1)


@inner
def middle_of(kind):
    """The code that stands for 0, or, with minima, the middle of the range."""
    top = float32(int64(1) << bits_of(kind))
    return (top - float32(1.0)) * float32(0.5) if has_minimum(kind) else top * float32(0.5)


@inner
def standard_queries(q, kind, mode, dim, rows, qw, qact, qscales, qsums):
    """Activations of q float32 [rows, dim] for every tile of an item.

    ``qw`` float32 [rows * dim] (mode F32) or ``qact`` uint8 [rows * dim * 2] with ``qscales``
    float32 [rows * blocks], all as [block, row, ..]; ``qsums`` float32 [blocks, rows, 2]: what a
    scale multiplies besides the codes' sum, and what a minimum multiplies.
    """
    middle = middle_of(kind)
    for b in range(dim // BLOCK):
        for r in range(rows):
            i, at = b * rows + r, r * dim + b * BLOCK
            a, c = load(q, at), load(q, at + 16)
            total = hsum(a + c)
            kept = total
            if mode == F32:
                store(qw, i * BLOCK, a)
                store(qw, i * BLOCK + 16, c)
            else:
                largest = hmax(vmax(vabs(a), vabs(c)))
                inverse, scale = activation_scale(largest, mode == I8)
                ra, ia = round_scaled(a, inverse)
                rc, ic = round_scaled(c, inverse)
                if mode == I8:
                    store_bytes(qact, i * BLOCK, ia, ic, 0)
                else:
                    store_bytes(qact, i * 2 * BLOCK, round_up_byte(ia), round_up_byte(ic), 1)
                    store_bytes(qact, i * 2 * BLOCK + BLOCK, ia, ic, 0)
                qscales[i] = scale
                kept = scale * hsum(ra + rc)
            # The codes' sum meets the rounded activations; seen from the middle of the codes, what
            # rounding lost of their sum cancels.
            if has_minimum(kind):
                qsums[2 * i], qsums[2 * i + 1] = middle * (total - kept), total
            else:
                qsums[2 * i], qsums[2 * i + 1] = -middle * kept, float32(0.0)


@inner
def standard_scores(
    kind, mode, dots, codes, halves, at, ahead, dim, rows, qw, qact, qscales, qsums, tmp, scores,
    tops,
):  # fmt: skip
    """scores[row, 128] = q . K of one tile, and their largest, ``tops[row]``.

    ``at`` = byte offset of the tile in ``codes``, ``ahead`` = bytes from it to the next tile, 0
    for none; ``halves`` is the uint16 view of ``codes``; ``tmp`` float32 [min(rows, 4) * 128].

    Lanes of tokens outside may hold garbage (even NaN) until they are hidden: lanes never mix.
    """
    blocks, piece = dim // BLOCK, GROUP * BLOCK // 8 * bits_of(kind)
    scale_at = (at + blocks * piece) // 2
    minimum_at = scale_at + blocks * GROUP
    minima = has_minimum(kind)
    for t in range(0, blocks * GROUP, 32):
        prefetch(halves, scale_at + ahead // 2 + t)
        if minima:
            prefetch(halves, minimum_at + ahead // 2 + t)
    r = int64(0)
    while r < rows:
        size, which = block_of(rows - r)
        for b in range(blocks):
            i = b * rows + r
            if mode == F32:
                call_dot(
                    dots[which], codes, at + b * piece, qw, i * BLOCK, qscales, int64(0), tmp,
                    int64(0), int64(GROUP), int64(BLOCK), ahead,
                )  # fmt: skip
            else:
                row_bytes = BLOCK if mode == I8 else 2 * BLOCK
                call_dot(
                    dots[which], codes, at + b * piece, qact, i * row_bytes, qscales, i, tmp,
                    int64(0), int64(GROUP), int64(BLOCK), ahead,
                )  # fmt: skip
            for j in range(size):
                add, total = splat(qsums[2 * (i + j)]), splat(qsums[2 * (i + j) + 1])
                for t in range(0, GROUP, 16):
                    scale = load_half(halves, scale_at + b * GROUP + t)
                    s = (load(tmp, j * GROUP + t) + add) * scale
                    if minima:
                        s = fma(load_half(halves, minimum_at + b * GROUP + t), total, s)
                    if b > 0:
                        s = s + load(scores, (r + j) * GROUP + t)
                    store(scores, (r + j) * GROUP + t, s)
        r += size
    for r in range(rows):
        top = splat(MINUS_INF)
        for t in range(0, GROUP, 16):
            top = vmax(load(scores, r * GROUP + t), top)
        tops[r] = hmax(top)


@inner
def standard_values(
    p, kind, mode, dots, codes, halves, at, ahead, dim, rows, gated, axes, w, act, scales, tmp, zs,
    alpha, o,
):  # fmt: skip
    """o[row, dim] = o * alpha + sum_t p[t] * value[t] for p float32 [rows, 128].

    ``at``, ``ahead`` and ``halves`` as in :func:`standard_scores`; ``gated``: some token is hidden
    from some row. ``axes`` float32 [256], ``w`` float32 [rows * 128], ``act`` uint8 [rows * 256],
    ``scales`` float32 [rows * 4], ``tmp`` float32 [rows * 32] and ``zs`` [rows] are room to work.
    """
    blocks, piece = dim // BLOCK, GROUP * BLOCK // 8 * bits_of(kind)
    scale_at = (at + blocks * piece) // 2
    minimum_at = scale_at + blocks * GROUP
    minima, middle = has_minimum(kind), middle_of(kind)
    for b in range(blocks):
        for t in range(0, GROUP, 32):
            prefetch(halves, scale_at + b * GROUP + ahead // 2 + t)
            if minima:
                prefetch(halves, minimum_at + b * GROUP + ahead // 2 + t)
        for t in range(0, GROUP, 16):
            scale = load_half(halves, scale_at + b * GROUP + t)
            store(axes, t, scale)
            if minima:
                store(axes, GROUP + t, load_half(halves, minimum_at + b * GROUP + t))
            else:
                store(axes, GROUP + t, scale * splat(-middle))
        for r in range(rows):
            zs[r] = fold_row(
                mode, p, r * GROUP, axes, int64(GROUP), gated, middle, r, w, act, scales
            )
        times_codes(
            dots, mode, codes, at + b * piece, w, act, scales, tmp, rows, int64(BLOCK),
            int64(GROUP), ahead,
        )  # fmt: skip
        for r in range(rows):
            z, a = splat(zs[r]), splat(alpha[r])
            for d in range(0, BLOCK, 16):
                i = r * dim + b * BLOCK + d
                store(o, i, fma(load(o, i), a, load(tmp, r * BLOCK + d) + z))
