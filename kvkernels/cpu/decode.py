"""Entry ``cpu/attend_decode``: up to 16 query rows per sequence, straight from records."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.calls import AttendCall, Batch
from kvkernels.cpu import masks
from kvkernels.cpu.kernels import attend as kernels
from kvkernels.cpu.kernels.codec import rotate_rows
from kvkernels.cpu.kernels.dot import ROW_BLOCKS, dot_address
from kvkernels.cpu.kernels.merge import merge
from kvkernels.cpu.pool import ThreadPool
from kvkernels.cpu.scratch import Scratch
from kvkernels.op import LayerSpec
from kvkernels.records.layout import GROUP, HeadLayout, Side

MAX_N_Q = 16
#: sealed groups per work item: fixed, so that the order of additions never depends on threads or
#: batch mates (B7)
CHUNK = 16

Ints = NDArray[np.int64]
_NO_MASK = np.zeros(1, np.float32)
_NO_TILE = np.zeros((1, 4), np.int64)


@dataclass(frozen=True, slots=True)
class Work:
    """Launch lists of one batch for layers with ``n_kv_head`` heads (see ``kernels/attend.py`` for
    the columns).
    """

    seqs: Ints
    items: Ints
    tiles: Ints
    heads: Ints
    table: NDArray[np.int32]


def work_of(batch: Batch, n_kv_head: int, current: bool) -> Work:
    """The lists for this batch, made once per step."""
    key = ("cpu/attend_decode", n_kv_head, current)
    if key not in batch.prepared:
        batch.prepared[key] = _build(batch, n_kv_head, current)
    work: Work = batch.prepared[key]
    return work


def _build(batch: Batch, n_kv_head: int, current: bool) -> Work:
    seqs: list[tuple[int, ...]] = []
    items: list[tuple[int, ...]] = []
    tiles: list[tuple[int, ...]] = []
    heads: list[tuple[int, ...]] = []
    tables = []
    table_at = 0
    for s, v in enumerate(batch.views):
        seqs.append((v.q_start, v.n_q, v.n_past, table_at, v.twin_group, -1, 0, 0))
        tables.append(v.table)
        table_at += len(v.table)
        first_tile = len(tiles)
        tiles += [(t.block, t.base, t.rows, int(t.twin)) for t in v.tiles]
        start, stop = v.body
        # Chunk edges sit on fixed group numbers, so a longer context keeps the shorter one's
        # partial sums.
        edges = [start, *range((start // CHUNK + 1) * CHUNK, stop, CHUNK), stop]
        for h in range(n_kv_head):
            begin = len(items)
            for a, b in pairwise(edges):
                if a < b:
                    items.append((s, h, kernels.BODY, a, b, len(items)))
            if v.tiles:
                items.append((s, h, kernels.EXACT, first_tile, len(tiles), len(items)))
            heads.append((begin, len(items) - begin, int(current)))
            if current:
                items.append((s, h, kernels.CURRENT, 0, 1, len(items)))
    return Work(
        np.array(seqs, np.int64),
        np.array(items, np.int64).reshape(-1, 6),
        np.array(tiles, np.int64) if tiles else _NO_TILE,
        np.array(heads, np.int64),
        np.concatenate(tables) if table_at else np.zeros(1, np.int32),
    )


def geometry(layer: LayerSpec, slots: int, blocks: int) -> Ints:
    """The ``shape`` vector of ``kernels/attend.py``."""
    assert layer.k_bits is not None
    assert layer.v_bits is not None
    k = HeadLayout(Side.K, layer.k_bits, layer.head_dim)
    v = HeadLayout(Side.V, layer.v_bits, layer.head_dim)
    window = layer.window or 0
    return np.array(
        [
            layer.n_head, layer.n_kv_head, layer.head_dim, k.slice_width, window,
            min(GROUP, window) if window else GROUP, 1, k.record.nbytes, v.record.nbytes,
            slots, slots, blocks,
        ],
        np.int64,
    )  # fmt: skip


def dots(bits: int) -> Ints:
    """Addresses of the micro-kernels for 4, 2 and 1 rows."""
    return np.array([dot_address(bits, rows) for rows in ROW_BLOCKS], np.int64)


def attend_decode(call: AttendCall, scratch: Scratch, pool: ThreadPool) -> None:
    """Fill ``call.out`` and ``call.lse`` for the rows of the batch."""
    layer, buffers, views = call.layer, call.buffers, call.batch.views
    assert max(v.n_q for v in views) <= MAX_N_Q
    current = call.k is not None
    work = work_of(call.batch, layer.n_kv_head, current)
    seqs, mask = work.seqs, _NO_MASK
    if any(m is not None for m in call.masks):
        seqs, mask = masks.flatten(work.seqs, views, call.masks, layer.n_head)
    n_rows, dim = call.batch.n_rows, layer.head_dim
    q = call.q.reshape(-1)
    rotated_q = scratch.get("q_rotated", (n_rows * layer.n_head * dim,), np.float32)
    rotate_rows(call.q.reshape(-1, dim), rotated_q.reshape(-1, dim))
    rows = max(v.n_q for v in views) * layer.gqa
    parts = len(work.items)
    pm = scratch.get("part_max", (parts, rows), np.float32)
    pl = scratch.get("part_sum", (parts, rows), np.float32)
    po = scratch.get("part_out", (parts, rows * dim), np.float32)
    shape = geometry(layer, buffers.slots, buffers.blocks)
    k_new: Any = call.k.reshape(-1) if current else _NO_MASK  # type: ignore[union-attr]
    v_new: Any = call.v.reshape(-1) if current else _NO_MASK  # type: ignore[union-attr]
    assert layer.k_bits is not None
    assert layer.v_bits is not None
    arguments = (
        work.items, seqs, work.tiles, work.table, shape, dots(layer.k_bits), dots(layer.v_bits),
        rotated_q, q, np.float32(layer.scale), np.float32(layer.softcap),
        masks.slopes(layer.n_head, layer.alibi), mask,
        buffers.k_records, buffers.k_records.view(np.uint16),
        buffers.v_records, buffers.v_records.view(np.uint16),
        buffers.k_exact, buffers.v_exact, k_new, v_new, pm, pl, po,
    )  # fmt: skip
    pool.ranges(lambda a, b: kernels.run_items(a, b, *arguments), parts)
    # The current rows were summed un-rotated; only the rest has to be rotated back before the two
    # meet.
    rotated = scratch.get("out_rotated", (n_rows * layer.n_head, dim), np.float32)
    plain = scratch.get("out_plain", (n_rows * layer.n_head, dim), np.float32)
    has_sinks = call.sink_logits is not None
    merge(
        seqs, work.heads, shape, call.sink_logits if has_sinks else _NO_MASK, has_sinks,
        pm, pl, po, rotated.reshape(-1), plain.reshape(-1), call.lse.reshape(-1),
    )  # fmt: skip
    rotate_rows(rotated, rotated_q.reshape(-1, dim))
    back = rotated_q.reshape(call.out.shape)
    for v in views:
        at = slice(v.q_start, v.q_start + v.n_q)
        np.add(back[at], plain.reshape(call.out.shape)[at], out=call.out[at])
