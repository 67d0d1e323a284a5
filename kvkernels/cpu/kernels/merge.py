"""Join the partial results of a decode by (maximum, sum), in a fixed order (semantics B6, B7)."""

import numpy as np
from numba import float32, int64

from kvkernels.cpu.kernels.finish import finish_row
from kvkernels.cpu.kernels.jit import kernel
from kvkernels.cpu.kernels.rotate import rotate_row
from kvkernels.cpu.kernels.simd import fma, load, splat, store
from kvkernels.cpu.kernels.softmax import MINUS_INF, decay
from kvkernels.cpu.kernels.tiles import DIM_V, N_HEAD, N_KV_HEAD, Q_START

# columns of `joins`: the parts of one block of queries, rotated ones first
J_SEQ, J_HEAD, J_FIRST, J_QUERIES, J_PART, J_ROTATED, J_PLAIN = range(7)


@kernel
def merge(shape, joins, seqs, pm, pl, po, sink_logits, has_sinks, out, lse):
    """out float32 [T, n_head, D] and lse [T, n_head], flat. Rotated sums are rotated back here."""
    dim = shape[DIM_V]
    gqa = shape[N_HEAD] // shape[N_KV_HEAD]
    both = np.empty(2 * dim, np.float32)
    rotated, plain = both[:dim], both[dim:]
    back = np.empty(dim, np.float32)
    for j in range(joins.shape[0]):
        begin = joins[j, J_PART]
        middle = begin + joins[j, J_ROTATED]
        end = middle + joins[j, J_PLAIN]
        row0 = seqs[joins[j, J_SEQ], Q_START] + joins[j, J_FIRST]
        for r in range(joins[j, J_QUERIES] * gqa):
            top, total = MINUS_INF, float32(0.0)
            for p in range(begin, end):
                top = max(top, pm[p, r])
            for d in range(0, 2 * dim, 16):
                store(both, d, splat(float32(0.0)))
            for p in range(begin, end):
                if pm[p, r] == MINUS_INF:
                    continue
                f = decay(pm[p, r], top)
                total += pl[p, r] * f
                target = rotated if p < middle else plain
                for d in range(0, dim, 16):
                    store(target, d, fma(load(po[p], r * dim + d), splat(f), load(target, d)))
            # Records were summed rotated; that is rotated back before it meets the rest.
            if middle > begin:
                rotate_row(rotated, back, dim)
                for d in range(0, dim, 16):
                    store(back, d, load(back, d) + load(plain, d))
            else:
                for d in range(0, dim, 16):
                    store(back, d, load(plain, d))
            head = joins[j, J_HEAD] * gqa + r % gqa
            row = (row0 + r // gqa) * shape[N_HEAD] + head
            finish_row(back, int64(0), dim, top, total, sink_logits, has_sinks, head, out, lse, row)
