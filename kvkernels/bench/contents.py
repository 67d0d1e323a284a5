"""What a cache filled with repeating rows holds, in float64: what attention over it must see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels import quants
from kvkernels.bench.workload import F32, F64, Rows
from kvkernels.cache import Cache
from kvkernels.cpu import reference
from kvkernels.records.layout import GROUP, HeadLayout, Side
from kvkernels.storage import Body


def taken(rows: NDArray[Any], start: int, n: int) -> NDArray[Any]:
    """Rows ``start .. start + n`` of the endless repetition of one period."""
    found: NDArray[Any] = np.take(rows, np.arange(start, start + n) % len(rows), axis=0)
    return found


def repeat(source: NDArray[Any], out: NDArray[Any]) -> None:
    """Fill ``out`` with one period after the other."""
    for start in range(0, len(out), len(source)):
        part = out[start : start + len(source)]
        part[:] = source[: len(part)]


def heads(
    cache: Cache, rows: Rows, past: int, ahead: int = 0, new: int = 0
) -> Iterator[tuple[F64, F64]]:
    """Keys and values [n, D] of one KV head after the other as the row ``ahead`` of the next one
    sees them: ``past`` rows of the repetition of ``rows`` (one period), and ``new`` exact ones.
    """
    spec, seen = cache.plan.layers[0].spec, (past, ahead)
    for h in range(spec.n_kv_head):
        pair = []
        for side, exact in ((Side.K, rows.k[:, h]), (Side.V, rows.v[:, h])):
            out = np.empty((past + new, exact.shape[1]))
            _fill_body(cache, side, h, exact, seen, out[:past])
            _fill_tail(cache, side, exact, seen, out[:past])
            out[past:] = taken(exact, past, new)
            pair.append(out)
        yield pair[0], pair[1]


def _fill_body(
    cache: Cache, side: Side, h: int, exact: F32, seen: tuple[int, int], out: F64
) -> None:
    storage = cache.plan.layers[0].storage
    if storage.body is Body.RECORDS:
        _fill_records(cache, side, h, exact, seen, out)
    else:
        repeat(_through(exact, storage.k if side is Side.K else storage.v), out)


def _fill_records(
    cache: Cache, side: Side, h: int, exact: F32, seen: tuple[int, int], out: F64
) -> None:
    """Every record decoded by the reference, else the row as the stage rounds it."""
    spec, buffers = cache.plan.layers[0].spec, cache.buffers[0]
    on_k, (past, ahead) = side is Side.K, seen
    bits, pool = (spec.k_bits, buffers.k_records) if on_k else (spec.v_bits, buffers.v_records)
    assert bits is not None
    dim, pages = spec.head_dim, cache.state[0].pages[cache.class_of[0]]
    nbytes = HeadLayout(side, bits, dim).nbytes
    records = np.asarray(pool).reshape(spec.n_kv_head, -1, nbytes)[h]
    staged = reference.stage_rows(exact[:, None]).astype(np.float64)
    repeat(reference.rotate(staged, np.float64)[:, 0], out)
    known: dict[int, F64] = {}
    for group, slot in enumerate(pages.table):
        stop = (group + 1) * GROUP
        if group in pages.blocks:  # a row sees the 128 up to itself exactly
            stop = min(stop, past + ahead - GROUP + 1)
        if slot < 0 or stop <= group * GROUP:  # sinks have no record
            continue
        content = group % (len(exact) // GROUP)
        if content not in known:
            tile = reference.decode(records[slot], side, bits, dim)
            known[content] = reference.rotate(tile, np.float64)
        out[group * GROUP : stop] = known[content][: stop - group * GROUP]


def _fill_tail(cache: Cache, side: Side, exact: F32, seen: tuple[int, int], out: F64) -> None:
    """The newest rows, which a query takes from the ring; it counts itself among them (T6)."""
    storage, (past, ahead) = cache.plan.layers[0].storage, seen
    ring = cache.state[0].pages[cache.class_of[0]].ring
    if ring is None:
        return
    start = max(ring.start, past + ahead + 1 - storage.tail_rows)
    kind = storage.ring_types[0 if side is Side.K else 1]
    out[start:] = _through(taken(exact, start, max(0, past - start)), kind)


def _through(rows: F32, kind: str) -> F64:
    """Rows as a standard type keeps them."""
    kept = quants.decode(quants.encode(rows, kind), kind, rows.shape[-1])
    return kept.astype(np.float64)
