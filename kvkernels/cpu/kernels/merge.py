"""Join partial results by (maximum, sum), in a fixed order (semantics B6, B7)."""

import numpy as np
from numba import float32

from kvkernels.cpu.kernels.attend import HEAD_DIM, N_HEAD, N_KV_HEAD, N_Q, Q_START
from kvkernels.cpu.kernels.jit import kernel
from kvkernels.cpu.kernels.simd import fma, load, splat, store
from kvkernels.cpu.kernels.softmax import MINUS_INF, decay


@kernel
def merge(seqs, heads, shape, sink_logits, has_sinks, pm, pl, po, rotated, plain, lse):
    """Join partial results: ``rotated`` (still to be rotated back) and ``plain`` [T, n_head, D];
    lse [T, n_head].

    heads: int64 [n_seq * n_kv_head, 3] = first part, number of rotated parts, number of plain parts
    after them.
    """
    dim, n_kv_head = shape[HEAD_DIM], shape[N_KV_HEAD]
    gqa = shape[N_HEAD] // n_kv_head
    for s in range(seqs.shape[0]):
        for h in range(n_kv_head):
            begin = heads[s * n_kv_head + h, 0]
            middle = begin + heads[s * n_kv_head + h, 1]
            end = middle + heads[s * n_kv_head + h, 2]
            for r in range(seqs[s, N_Q] * gqa):
                head = h * gqa + r % gqa
                row = (seqs[s, Q_START] + r // gqa) * shape[N_HEAD] + head
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
