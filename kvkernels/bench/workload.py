"""Caches filled with real records, the same data for the baselines, and float64 expectations."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.backend import Device
from kvkernels.cache import Cache
from kvkernels.cpu import reference
from kvkernels.cpu.pool import available_threads
from kvkernels.dispatch import Policy
from kvkernels.op import GROUP, LayerSpec
from kvkernels.planner import Limits, plan
from kvkernels.records.layout import HeadLayout, Side

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
_FILL_ROWS = 512
_WIDE_ROWS = 256
_BLAS_ALONE = 1 << 18  # multiplications up to which OpenBLAS uses one thread


@dataclass(frozen=True, slots=True)
class Rows:
    """Random rows of one layer, float32: q [n, n_head, D], k and v [n, n_kv_head, D]."""

    q: F32
    k: F32
    v: F32


def random_rows(spec: LayerSpec, n: int, seed: int = 7) -> Rows:
    """Rows like a model's: K has a few channels far larger than the rest, and drifts slowly."""
    rng = np.random.default_rng(seed)
    shape = (n, spec.n_kv_head, spec.head_dim)
    k = rng.standard_normal(shape, np.float32)
    k[:, :, :: spec.head_dim // 4] *= np.float32(6)
    k += rng.standard_normal((1, *shape[1:]), np.float32)
    q = rng.standard_normal((n, spec.n_head, spec.head_dim), np.float32)
    return Rows(q, k, rng.standard_normal(shape, np.float32))


def store(cache: Cache, rows: Rows, n: int, seq: int = 0) -> None:
    """Commit the first ``n`` rows in every layer without computing their attention.

    Filling a long cache would spend minutes on prefill that nobody looks at. The commit is the real
    one: rows are rotated, staged and sealed as after any step.
    """
    for start in range(0, n, _FILL_ROWS):
        at = slice(start, min(n, start + _FILL_ROWS))
        step = cache.step({seq: at.stop - at.start})
        device = cache.device
        parts = tuple(device.rows(name, getattr(rows, name)[at]) for name in "qkv")
        step._rows = dict.fromkeys(range(len(cache.plan.layers)), parts)
        step.commit()


def filled(
    spec: LayerSpec,
    device: Device,
    rows: Rows,
    n: int,
    policy: Policy | None = None,
    room: int = GROUP,
    activations: str = "auto",
    n_layers: int = 1,
) -> Cache:
    """A cache of equal layers that all hold the first ``n`` rows, with ``room`` for more."""
    limits = Limits(n_ctx=n + room, n_ubatch=_FILL_ROWS, activations=activations)
    cache = plan([spec] * n_layers, device, limits, policy).allocate()
    store(cache, rows, n)
    return cache


def decoded(
    cache: Cache, rows: Rows, seq: int = 0, *, newest_exact: bool = True
) -> tuple[F64, F64]:
    """What attention of the next row should see, float64 [n, n_kv_head, D], un-rotated: records as
    the NumPy reference decodes their bytes, else the rows as the stage rounds them.

    Without ``newest_exact`` every row that has a record comes from it.
    """
    state, spec = cache.state[seq], cache.plan.layers[0].spec
    pages = state.pages[cache.class_of[0]]
    buffers = cache.buffers[0]
    found = []
    for side, bits, pool, exact in (
        (Side.K, spec.k_bits, buffers.k_records, rows.k),
        (Side.V, spec.v_bits, buffers.v_records, rows.v),
    ):
        assert bits is not None
        nbytes = HeadLayout(side, bits, spec.head_dim).nbytes
        records = np.asarray(pool).reshape(spec.n_kv_head, -1, nbytes)
        out = reference.stage_rows(exact[: state.n]).astype(np.float64)
        for group, slot in enumerate(pages.table):
            stop = (group + 1) * GROUP
            if newest_exact and group in pages.blocks:  # the newest 128 rows are seen exactly
                stop = min(stop, state.n - GROUP + 1)
            if slot < 0 or stop <= group * GROUP:  # sinks have no record
                continue
            for h in range(spec.n_kv_head):
                tile = reference.decode(records[h, slot], side, bits, spec.head_dim)
                out[group * GROUP : stop, h] = tile[: stop - group * GROUP]
        found.append(reference.rotate(out, np.float64))
    return found[0], found[1]


def attend64(spec: LayerSpec, q: F32, k: F64, v: F64) -> F64:
    """Attention of one row over all rows in float64: q [n_head, D], k and v [n, n_kv_head, D]."""
    grouped = q.astype(np.float64).reshape(spec.n_kv_head, spec.gqa, spec.head_dim)
    out = np.empty_like(grouped)
    for h, rows in enumerate(grouped):  # contiguous heads: strided float64 products take ages
        scores = rows @ np.ascontiguousarray(k[:, h]).T * spec.scale
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out[h] = (p / p.sum(-1, keepdims=True)) @ np.ascontiguousarray(v[:, h])
    return out.reshape(spec.n_head, spec.head_dim)


def relative_error(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """RMS of the difference over RMS of the expectation."""
    gap = np.asarray(found, np.float64) - expected
    return float(np.sqrt((gap**2).mean() / (expected**2).mean()))


def numpy_step(
    spec: LayerSpec, q: F32, k: NDArray[Any], v: NDArray[Any], threads: int | None = None
) -> Callable[[], NDArray[np.float32]]:
    """The quickest decode step in NumPy that we know over a ready cache, k and v [n, n_kv_head, D]
    stored as given; which one it is, is tried out here and now.

    Kept head by head ([n_kv_head, n, D]), which is the layout BLAS likes best. Candidates: batched
    matrix products with BLAS's own threads (float32), and heads in blocks of rows, one after the
    other or on threads of our own. Blocks are so small that BLAS stays on one thread: its threads
    spin, and on a busy machine a step with them takes a hundred times longer. A float16 cache is
    widened block by block: NumPy has no float16 matrix product worth the name.
    """
    keys = np.ascontiguousarray(k.transpose(1, 0, 2))
    values = np.ascontiguousarray(v.transpose(1, 0, 2))
    grouped = q.reshape(spec.n_kv_head, spec.gqa, spec.head_dim) * np.float32(spec.scale)
    n, heads = keys.shape[1], range(spec.n_kv_head)
    rows = max(64, min(_WIDE_ROWS, _BLAS_ALONE // (spec.gqa * spec.head_dim)))
    blocks = [(a, min(n, a + rows)) for a in range(0, n, rows)]
    narrow = keys.dtype != np.float32
    workers = threads or available_threads()
    pool = ThreadPoolExecutor(workers)

    def batched() -> F32:
        out: F32 = _softmax(grouped @ keys.transpose(0, 2, 1)) @ values
        return out.reshape(spec.n_head, spec.head_dim)

    def head(h: int, out: F32) -> None:
        wide = np.empty((rows, spec.head_dim), np.float32)
        scores = np.empty((spec.gqa, n), np.float32)
        for a, b in blocks:
            part = _widened(keys[h, a:b], wide) if narrow else keys[h, a:b]
            np.matmul(grouped[h], part.T, out=scores[:, a:b])
        p = _softmax(scores)
        for a, b in blocks:
            part = _widened(values[h, a:b], wide) if narrow else values[h, a:b]
            out[h] += p[:, a:b] @ part

    def serial() -> F32:
        out = np.zeros(grouped.shape, np.float32)
        for h in heads:
            head(h, out)
        return out.reshape(spec.n_head, spec.head_dim)

    def threaded() -> F32:
        out = np.zeros(grouped.shape, np.float32)
        for _ in pool.map(lambda h: head(h, out), heads):
            pass
        return out.reshape(spec.n_head, spec.head_dim)

    known = [serial] if narrow else [batched, serial]
    if workers > 1:
        known.append(threaded)
    return min(known, key=_best_of_five)


def _softmax(scores: F32) -> F32:
    p: F32 = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p


def _widened(part: NDArray[Any], wide: F32) -> F32:
    np.copyto(wide[: len(part)], part)
    return wide[: len(part)]


def _best_of_five(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(6):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])
