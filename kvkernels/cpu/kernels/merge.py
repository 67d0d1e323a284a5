"""Join partial results by (maximum, sum), in a fixed order (semantics B6, B7)."""

import numpy as np
from numba import float32

from kvkernels.cpu.kernels.jit import kernel
from kvkernels.cpu.kernels.simd import fma, load, splat, store
from kvkernels.cpu.kernels.softmax import MINUS_INF, decay
from kvkernels.cpu.kernels.tiles import HEAD_DIM, N_HEAD, N_KV_HEAD, Q_START

# columns of `joins`: the parts of one block of queries, rotated ones first
J_SEQ, J_HEAD, J_FIRST, J_QUERIES, J_PART, J_ROTATED, J_PLAIN = range(7)


@kernel
def merge(seqs, joins, shape, sink_logits, has_sinks, pm, pl, po, rotated, plain, lse):
    """``rotated`` (still to be rotated back) and ``plain`` float32 [T, n_head, D]; lse [T,
    n_head]; all flat.
    """
    dim = shape[HEAD_DIM]
    gqa = shape[N_HEAD] // shape[N_KV_HEAD]
    for j in range(joins.shape[0]):
        begin = joins[j, J_PART]
        middle = begin + joins[j, J_ROTATED]
        end = middle + joins[j, J_PLAIN]
        row0 = seqs[joins[j, J_SEQ], Q_START] + joins[j, J_FIRST]
        for r in range(joins[j, J_QUERIES] * gqa):
            head = joins[j, J_HEAD] * gqa + r % gqa
            row = (row0 + r // gqa) * shape[N_HEAD] + head
            top = MINUS_INF
            for p in range(begin, end):
                top = max(top, pm[p, r])
            if has_sinks:
                top = max(top, sink_logits[head])
            total = float32(0.0)
            for d in range(0, dim, 16):
                store(rotated, row * dim + d, splat(float32(0.0)))
                store(plain, row * dim + d, splat(float32(0.0)))
            for p in range(begin, end):
                if pm[p, r] == MINUS_INF:
                    continue
                f = decay(pm[p, r], top)
                total += pl[p, r] * f
                target = rotated if p < middle else plain
                for d in range(0, dim, 16):
                    x = load(target, row * dim + d)
                    store(target, row * dim + d, fma(load(po[p], r * dim + d), splat(f), x))
            if has_sinks:
                total += decay(sink_logits[head], top)
            lse[row] = MINUS_INF if total == float32(0.0) else top + np.log(total)
            inverse = float32(0.0) if total == float32(0.0) else float32(1.0) / total
            for d in range(0, dim, 16):
                i = row * dim + d
                store(rotated, i, load(rotated, i) * splat(inverse))
                store(plain, i, load(plain, i) * splat(inverse))
