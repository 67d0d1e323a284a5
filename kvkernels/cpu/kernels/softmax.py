"""One row of scores: softcap, bias, mask, and the online softmax step (semantics B1-B3).

Scores are natural (already times the logit scale); ``at`` and lengths are in float32 elements,
lengths multiples of 16. A row that sees nothing keeps its maximum at -inf and its probabilities at
exactly 0.
"""

import numpy as np
from numba import float32, int64

from kvkernels.cpu.kernels.jit import inner
from kvkernels.cpu.kernels.simd import (
    exp2,
    first,
    fma,
    hmax,
    hsum,
    iota,
    load,
    splat,
    store,
    vabs,
    vmax,
    vmin,
    where_between,
)

LOG2E = np.float32(1.4426950408889634)
MINUS_INF = np.float32(-np.inf)


@inner
def softcap_lanes(x, cap):
    """cap * tanh(x / cap), through exp2; absolute error below 2e-7 * cap."""
    power = x * splat(float32(2.0) * LOG2E / cap)
    e = exp2(vmin(vmax(power, splat(float32(-126.0))), splat(float32(126.0))))
    return splat(cap) - splat(float32(2.0) * cap) / (e + splat(float32(1.0)))


@inner
def prepare_row(scores, at, n, low, high, cap, slope, distance, mask, mask_at):
    """In place: cap, take ``slope * |key - query|`` off, add the mask, set keys outside [low, high)
    to -inf.

    ``distance`` = position of key 0 minus position of the query; ``mask_at`` < 0 means no mask, and
    the mask is only read for keys in [low, high). Returns the largest score.
    """
    if mask_at >= 0:
        for t in range(max(low, 0), min(high, n)):
            # Hidden by the mask: whatever the score is (even NaN), it must not survive.
            bias = mask[mask_at + t]
            if cap > float32(0.0):
                capped = first(softcap_lanes(splat(scores[at + t]), cap))
            else:
                capped = scores[at + t]
            shifted = capped - slope * float32(abs(distance + t)) + bias
            scores[at + t] = shifted if bias > MINUS_INF else MINUS_INF
    largest = splat(MINUS_INF)
    for t in range(0, n, 16):
        s = load(scores, at + t)
        if mask_at < 0:
            if cap > float32(0.0):
                s = softcap_lanes(s, cap)
            if slope != float32(0.0):
                s = fma(splat(-slope), vabs(iota(distance + t)), s)
        if low > t or high < t + 16:
            s = where_between(s, int64(t), low, high, MINUS_INF)
        store(scores, at + t, s)
        largest = vmax(s, largest)
    return hmax(largest)


@inner
def exponentials(scores, at, n, maximum):
    """In place: exp(score - maximum); returns their sum."""
    total = splat(float32(0.0))
    shift = splat(maximum)
    for t in range(0, n, 16):
        p = exp2((load(scores, at + t) - shift) * splat(LOG2E))
        store(scores, at + t, p)
        total = total + p
    return hsum(total)


@inner
def decay(before, after):
    """exp(before - after) for a running maximum that grew: 0 when there was nothing before."""
    return first(exp2(splat((before - after) * LOG2E)))
