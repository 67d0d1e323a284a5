"""Entries ``cpu/commit_rows`` (rows of standard types into tiles) and ``cpu/commit_tail`` (rows of
the precision tail into rings).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvkernels.calls import CommitCall, TailCall
from kvkernels.cpu.columns import STANDARD
from kvkernels.cpu.entries import compiled
from kvkernels.cpu.pool import ThreadPool
from kvkernels.memory import ring_slots, ring_tiles
from kvkernels.quants.tiles import BLOCK, TileLayout
from kvkernels.records.layout import GROUP, Side

_ROWS_PER_THREAD = 256


def commit_rows(call: CommitCall, threads: ThreadPool, isa: str) -> None:
    """Write new rows into their tiles; a tile that a fork shares is copied first."""
    layer, buffers = call.layer, call.buffers
    storage = buffers.storage
    # A few rows are written before a thread could wake.
    least = max(1, -(-_ROWS_PER_THREAD // max(1, sum(w.rows for w in call.writes))))
    for side, rows, pool, name in (
        (Side.K, call.k, buffers.k_records, storage.k),
        (Side.V, call.v, buffers.v_records, storage.v),
    ):
        nbytes = TileLayout(side, name, rows.shape[2]).nbytes
        tiles = pool.reshape(layer.n_kv_head, -1, nbytes)
        for w in call.writes:
            if w.row and w.base != w.slot:
                tiles[:, w.slot] = tiles[:, w.base]
        spans = np.array([(w.slot, w.row, w.rows, w.source) for w in call.writes], np.int64)
        if len(spans):
            views = (pool, pool.view(np.uint16), pool.view(np.float32))
            fixed = (
                np.ascontiguousarray(rows), STANDARD[name], side is Side.V, *views, buffers.slots,
                nbytes, spans,
            )  # fmt: skip
            threads.ranges(partial(_write, isa, fixed), layer.n_kv_head, least=least)


def _write(isa: str, fixed: tuple[Any, ...], start: int, stop: int) -> None:
    compiled(isa, "standard_rows.write_rows")(*fixed, start, stop, np.empty(BLOCK, np.uint8))


def commit_tail(call: TailCall, _isa: str) -> None:
    """Write new rows into their rings, un-rotated; a ring that a fork shares is copied first."""
    buffers, storage = call.buffers, call.buffers.storage
    k_type, v_type = storage.ring_types
    n = call.layer.n_kv_head
    dims = (call.layer.head_dim, call.layer.head_dim_v)
    k = _typed(buffers.k_ring, k_type).reshape(n, -1, dims[0] * ring_slots(storage))
    tiles = ring_tiles(k, dims[0], storage)
    v = _typed(buffers.v_ring, v_type).reshape(n, -1, storage.capacity, dims[1])
    for w in call.writes:
        if w.base >= 0:
            k[:, w.ring], v[:, w.ring] = k[:, w.base], v[:, w.base]
        rows = slice(w.source, w.source + w.rows)
        v[:, w.ring, w.slot : w.slot + w.rows] = call.v[rows].transpose(1, 0, 2)
        by_channel = call.k[rows].transpose(1, 2, 0)
        for first, tile in tiles[w.slot // GROUP : -(-(w.slot + w.rows) // GROUP)]:
            a, b = max(w.slot, first), min(w.slot + w.rows, first + GROUP)
            tile[:, w.ring, :, a - first : b - first] = by_channel[..., a - w.slot : b - w.slot]


_DTYPES = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


def _typed(words: Any, name: str) -> NDArray[Any]:
    typed: NDArray[Any] = words.view(_DTYPES[name])
    return typed
