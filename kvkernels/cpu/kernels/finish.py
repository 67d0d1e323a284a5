"""The end of a softmax: sink logit, division, log of the denominator (semantics B2, B3)."""

import numpy as np
from numba import float32

from kvkernels.cpu.kernels.jit import inner
from kvkernels.cpu.kernels.simd import load, splat, store
from kvkernels.cpu.kernels.softmax import MINUS_INF, decay


@inner
def finish_row(o, at, dim, top, total, sink_logits, has_sinks, head, out, lse, row):
    """out[row] = o / (total + sink) and lse[row], where ``top`` is the maximum behind both sums.

    A row that saw nothing is exactly 0 with lse = -inf; a sink joins the denominator only.
    """
    share = float32(1.0)
    if has_sinks:
        sink = sink_logits[head]
        joint = max(top, sink)
        share = decay(top, joint)
        total = total * share + decay(sink, joint)
        top = joint
    lse[row] = MINUS_INF if total == float32(0.0) else top + np.log(total)
    inverse = float32(0.0) if total == float32(0.0) else share / total
    for d in range(0, dim, 16):
        store(out, row * dim + d, load(o, at + d) * splat(inverse))
