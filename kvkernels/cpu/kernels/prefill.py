"""The softmax step of prefill: one block of query rows by one block of keys."""

from numba import float32, int64

from kvkernels.cpu.columns import NO_CUT
from kvkernels.cpu.kernels.jit import kernel
from kvkernels.cpu.kernels.softmax import MINUS_INF, decay, exponentials, prepare_row
from kvkernels.cpu.kernels.tiles import N_HEAD, N_KV_HEAD, visible


@kernel
def softmax_block(
    scores, width, shape, n_past, first_query, head0, base, n, twin, source, cap, slopes, mask,
    mask_head, mask_row, m, lsum, alpha,
):  # fmt: skip
    """Prefill: mask and exponentiate scores [rows, width] (keys ``base .. base + n``) in place, row
    by row.

    Row r is query ``first_query + r // gqa``, head ``head0 + r % gqa``; the rest of ``width``
    beyond n becomes 0. ``mask`` starts at the first row of the block; ``mask_head`` < 0 means no
    mask.
    """
    gqa = shape[N_HEAD] // shape[N_KV_HEAD]
    padded = (n + 15) // 16 * 16
    for r in range(m.size):
        position = n_past + first_query + r // gqa
        low, high = visible(shape, position, base, n, twin, source, NO_CUT)
        at = r * width
        for t in range(n, padded):
            scores[at + t] = float32(0.0)
        mask_at = int64(-1)
        if mask_head >= 0:
            mask_at = (head0 + r % gqa) * mask_head + (r // gqa) * mask_row
        top = prepare_row(
            scores,
            at,
            padded,
            low,
            high,
            cap,
            slopes[head0 + r % gqa],
            base - position,
            mask,
            mask_at,
        )
        alpha[r] = float32(1.0)
        if top == MINUS_INF:
            for t in range(padded):
                scores[at + t] = float32(0.0)
            continue
        if top > m[r]:
            alpha[r] = decay(m[r], top)
            m[r] = top
        lsum[r] = lsum[r] * alpha[r] + exponentials(scores, at, padded, m[r])
