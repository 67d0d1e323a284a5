"""Entries ``*/attend_portable`` and ``*/attend_prefill_portable``: attention straight from the
cache, in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkernels.calls import AttendCall, LayerBuffers
from kvkernels.cpu import masks
from kvkernels.memory import ring_slots
from kvkernels.op import KVARN_BITS, STANDARD_TYPES, WINDOW_KINDS, LayerSpec
from kvkernels.quants.tiles import TileLayout
from kvkernels.records.layout import GROUP, HeadLayout, Side
from kvkernels.simt.driver import Driver
from kvkernels.simt.launch import BODY, EXACT, Builder, Work, block_rows
from kvkernels.simt.program import Program
from kvkernels.simt.scratch import Scratch
from kvkernels.storage import Body, Storage

THREADS = 128
_MMA_PARTS = (
    "common", "geometry", "codes", "softmax", "items", "prims_{target}", "attend_mma",
)  # fmt: skip
_PARTS = (
    "common", "geometry", "codes", "softmax", "items", "floats", "records", "tiles", "partial",
    "attend",
)  # fmt: skip
#: kinds of elements as the sources number them
KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}
STANDARD = {name: kind for kind, name in enumerate(STANDARD_TYPES)}
_BODIES = {Body.NONE: 0, Body.RECORDS: 1, Body.TILES: 2}


def attend(
    call: AttendCall, driver: Driver, scratch: Scratch, *, prefill: bool, mma: bool = False
) -> None:
    """Fill ``call.out`` and ``call.lse`` for the rows of the batch; ``mma``: records on tensor
    cores.
    """
    layer, storage = call.layer, call.buffers.storage
    current = call.k is not None
    work = _work(call, driver, prefill=prefill, mma=mma)
    q = driver.see("q", call.q)
    q_kind, new_kind = KINDS[q.dtype], KINDS[driver.see("k", call.k).dtype] if current else 0
    rotated = None
    if work.sources & {BODY, EXACT}:
        size = (call.batch.n_rows * layer.n_head, layer.head_dim)
        rotated = scratch.get("rotated queries", size, np.float32)
        program = rotate_program(layer, q_kind)
        driver.launch(
            program, "rotate_queries", (size[0],), (call.q, rotated, np.float32(layer.scale))
        )
    words = work.parts * work.rows * (2 + layer.head_dim_v)
    partial = scratch.get("partial", (words,), np.float32)
    mask_of, mask = _masks(call, driver)
    shape, slopes = _layer_arguments(layer, call.buffers, driver)
    buffers = call.buffers
    bias = (mask_of, mask, partial, np.int32(work.parts))
    softcap, first = np.float32(layer.softcap), 0
    if mma and work.body:
        program = mma_program(layer, storage, work.rows)
        driver.launch(
            program, "attend_mma", (work.body,),
            (
                *shape, slopes, work.lists, np.int32(0), buffers.k_records, buffers.v_records,
                rotated, *bias, softcap,
            ),
        )  # fmt: skip
        first = work.body
    if first < work.items:
        program = attend_program(layer, storage, work.rows, q_kind, new_kind)
        driver.launch(
            program, "attend", (work.items - first,),
            (
                *shape, slopes, work.lists, np.int32(first), buffers.k_records, buffers.v_records,
                buffers.k_exact, buffers.v_exact, buffers.k_ring, buffers.v_ring, call.q, rotated,
                call.k, call.v, *bias, np.float32(layer.scale), softcap,
            ),
        )  # fmt: skip
    sinks = None if call.sink_logits is None else driver.upload(call.sink_logits)
    driver.launch(
        merge_program(layer, work.rows), "merge", (work.joins, work.rows),
        (
            work.lists, partial, np.int32(work.parts), np.int32(layer.n_head),
            np.int32(layer.gqa), sinks, call.out, call.lse,
        ),
    )  # fmt: skip


def rotate_program(layer: LayerSpec, q_kind: int) -> Program:
    """Queries into the rotated domain."""
    return Program.of(
        ("common", "rotate", "queries"), {"rotate_queries": THREADS},
        DIM=layer.head_dim, Q_KIND=q_kind,
    )  # fmt: skip


def merge_program(layer: LayerSpec, rows: int) -> Program:
    """Partial results into the output."""
    return Program.of(
        ("common", "rotate", "merge"), {"merge": THREADS},
        DIM_V=layer.head_dim_v, ROWS=rows,
    )  # fmt: skip


def attend_program(
    layer: LayerSpec, storage: Storage, rows: int, q_kind: int, new_kind: int
) -> Program:
    """The attention kernel for a layer's head dims, what it keeps, and the caller's rows."""
    return Program.of(
        _PARTS, {"attend": THREADS}, ROWS=rows, Q_KIND=q_kind, NEW_KIND=new_kind,
        **_stored(layer, storage),
    )  # fmt: skip


def mma_program(layer: LayerSpec, storage: Storage, rows: int) -> Program:
    """Records on tensor cores; ``rows``: 8 or 16."""
    return Program.of(
        _MMA_PARTS, {"attend_mma": THREADS}, ROWS=rows, **_stored(layer, storage),
    )  # fmt: skip


def _stored(layer: LayerSpec, storage: Storage) -> dict[str, int]:
    """What the sources must know of a layer's memory."""
    rings = [STANDARD[t] if storage.tail_rows else -1 for t in storage.ring_types]
    types, sizes = [0, 0], [0, 0]
    dims = (layer.head_dim, layer.head_dim_v)
    for i, (side, name) in enumerate(zip(Side, (storage.k, storage.v), strict=True)):
        if storage.body is Body.RECORDS:
            types[i] = KVARN_BITS[name]
            sizes[i] = HeadLayout(side, types[i], dims[i]).record.nbytes
        elif storage.body is Body.TILES:
            types[i], sizes[i] = STANDARD[name], TileLayout(side, name, dims[i]).nbytes
    return {
        "DIM": dims[0], "DIM_V": dims[1], "BODY": _BODIES[storage.body], "K_TYPE": types[0],
        "V_TYPE": types[1], "K_BYTES": sizes[0], "V_BYTES": sizes[1], "RING_K": rings[0],
        "RING_V": rings[1],
    }  # fmt: skip


def _work(call: AttendCall, driver: Driver, *, prefill: bool, mma: bool) -> Work:
    layer, batch, body = call.layer, call.batch, call.buffers.storage.body
    rows = block_rows(layer, max(v.n_q for v in batch.views), prefill=prefill, mma=mma)
    current = call.k is not None
    builder = Builder(layer, body, rows, current=current, prefill=prefill)
    if any(m is not None for m in call.masks) and any(v.tail for v in batch.views):
        work = builder.build(batch, masks.masked_cuts(batch, layer, call.masks))
        work.lists = driver.upload(work.lists)
        return work
    key = ("simt", layer.n_kv_head, layer.gqa, layer.causal, body, rows, current, prefill)
    if key not in batch.prepared:
        work = builder.build(batch, masks.newest_cuts(batch, layer))
        work.lists = driver.upload(work.lists)
        batch.prepared[key] = work
    found: Work = batch.prepared[key]
    return found


def _masks(call: AttendCall, driver: Driver) -> tuple[Any, Any]:
    """int32 [sequences, 4] (offset low, high, strides of heads and rows), and all masks flat."""
    if all(m is None for m in call.masks):
        return None, None
    seqs = np.full((len(call.batch.views), 8), -1, np.int64)
    current = call.k is not None
    seqs, flat = masks.flatten(seqs, call.batch.views, call.masks, call.layer.n_head, current)
    at = seqs[:, 5]
    words = np.stack((at & (2**31 - 1), at >> 31, seqs[:, 6], seqs[:, 7]), 1)
    return driver.upload(words.astype(np.int32)), driver.upload(flat)


def _layer_arguments(layer: LayerSpec, buffers: LayerBuffers, driver: Driver) -> tuple[Any, Any]:
    """What a layer passes in every launch: the fields of ``Shape``, ALiBi slopes on the device."""
    if "simt" not in buffers.prepared:
        storage, window = buffers.storage, layer.window or 0
        shape = [
            layer.n_head, layer.n_kv_head, window, WINDOW_KINDS.index(layer.window_kind),
            int(layer.causal), min(GROUP, window) if window else GROUP, buffers.slots,
            buffers.blocks, buffers.pages.rings, storage.capacity, ring_slots(storage),
        ]  # fmt: skip
        slopes = masks.slopes(layer.n_head, layer.alibi) if layer.alibi > 0 else None
        buffers.prepared["simt"] = (
            tuple(np.int32(x) for x in shape),
            None if slopes is None else driver.upload(slopes),
        )
    found: tuple[Any, Any] = buffers.prepared["simt"]
    return found
