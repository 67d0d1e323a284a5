"""Entries ``commit_rows`` (rows of standard types into tiles) and ``commit_tail`` (rows of the
precision tail into rings).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvkernels.calls import CommitCall, TailCall
from kvkernels.memory import ring_slots
from kvkernels.quants import BLOCK_TYPES
from kvkernels.quants.tiles import TileLayout
from kvkernels.records.layout import Side
from kvkernels.simt.driver import Driver, scalar
from kvkernels.simt.program import Program
from kvkernels.simt.scratch import Scratch
from kvkernels.simt.staging import kind_of, runs

#: cache types as kernels number them, in the order of the table
TYPES = {name: i for i, name in enumerate(BLOCK_TYPES)}
#: rows and channels that one block of threads takes, words that one copies (``elements.inc``)
_RUN, _CHANNELS, _WORDS = 32, 128, 4096

_ROWS = Program.of(("common", "elements", "lines", "rows"), {"copy_units": 128, "write_rows": 128})
_TAIL = Program.of(("common", "elements", "tail"), {"copy_units": 128, "write_tail": 128})


def commit_rows(driver: Driver, call: CommitCall, scratch: Scratch | None = None) -> None:
    """Enqueue the writing of new rows into their tiles; a tile that a fork shares is copied first.

    Rows are finite. With ``scratch`` the layers of a step share their uploaded lists.
    """
    layer, buffers = call.layer, call.buffers
    storage, heads = buffers.storage, layer.n_kv_head
    dims = (layer.head_dim, layer.head_dim_v)
    copies = [(w.base, w.slot) for w in call.writes if w.row and w.base != w.slot]
    sides = zip(
        Side,
        (storage.k, storage.v),
        dims,
        (buffers.k_records, buffers.v_records),
        strict=True,
    )
    for side, name, dim, pool in sides:
        nbytes = TileLayout(side, name, dim).nbytes
        _copy(driver, _ROWS, pool, copies, (heads, buffers.slots, nbytes), scratch)
    items = [
        (w.slot, at, n, w.source + at - w.row)
        for w in call.writes
        for at, n in runs(w.row, w.rows, _RUN)
    ]
    if not items:
        return
    k_runs, v_runs = (-(-dim // _CHANNELS) for dim in dims)
    args = (
        call.k, call.v, _kinds(driver, call), buffers.k_records, buffers.v_records,
        _listed(driver, items, scratch), *(scalar(n) for n in (heads, buffers.slots, k_runs)),
        *(scalar(n) for n in (*dims, TYPES[storage.k], TYPES[storage.v])),
    )  # fmt: skip
    driver.launch(_ROWS, "write_rows", (len(items), heads, k_runs + v_runs), args)


def commit_tail(driver: Driver, call: TailCall, scratch: Scratch | None = None) -> None:
    """Enqueue the writing of new rows into their rings, un-rotated; a ring that a fork shares is
    copied first.
    """
    layer, buffers = call.layer, call.buffers
    storage, heads, rings = buffers.storage, layer.n_kv_head, buffers.pages.rings
    dims, types = (layer.head_dim, layer.head_dim_v), storage.ring_types
    slots = (ring_slots(storage), storage.capacity)
    copies = [(w.base, w.ring) for w in call.writes if w.base >= 0]
    for pool, dim, n, name in zip(
        (buffers.k_ring, buffers.v_ring), dims, slots, types, strict=True
    ):
        nbytes = dim * n * BLOCK_TYPES[name].nbytes
        _copy(driver, _TAIL, pool, copies, (heads, rings, nbytes), scratch)
    items = [
        (w.ring, at, n, w.source + at - w.slot)
        for w in call.writes
        for at, n in runs(w.slot, w.rows, _RUN)
    ]
    if not items:
        return
    k_runs, v_runs = (-(-dim // _CHANNELS) for dim in dims)
    numbers = (heads, rings, *slots, k_runs, *dims, *(TYPES[t] for t in types))
    args = (
        call.k, call.v, _kinds(driver, call), buffers.k_ring, buffers.v_ring,
        _listed(driver, items, scratch), *(scalar(n) for n in numbers),
    )  # fmt: skip
    driver.launch(_TAIL, "write_tail", (len(items), heads, k_runs + v_runs), args)


def _kinds(driver: Driver, call: CommitCall | TailCall) -> np.generic:
    return scalar(kind_of(driver, "k", call.k) | kind_of(driver, "v", call.v) << 2)


def _copy(
    driver: Driver,
    program: Program,
    pool: Any,
    copies: Sequence[tuple[int, int]],
    shape: tuple[int, int, int],
    scratch: Scratch | None,
) -> None:
    """Copy units of a pool [heads, units, bytes] for every head."""
    heads, units, nbytes = shape
    if not copies:
        return
    words = nbytes // 4
    args = (pool, _listed(driver, copies, scratch), scalar(units), scalar(words))
    driver.launch(program, "copy_units", (len(copies), heads, -(-words // _WORDS)), args)


def _listed(driver: Driver, items: Sequence[tuple[int, ...]], scratch: Scratch | None) -> Any:
    host = np.array(items, np.int32)
    return driver.upload(host) if scratch is None else scratch.constant(host)
