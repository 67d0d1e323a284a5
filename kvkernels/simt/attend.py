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
#: fields of the struct ``Shape`` of sources/softmax.inc, the first arguments of attention kernels
SHAPE = (
    "n_head", "n_kv_head", "window", "window_kind", "causal", "exact_n", "slots", "blocks", "rings",
    "ring_rows", "ring_slots",
)  # fmt: skip
_BODIES = {Body.NONE: 0, Body.RECORDS: 1, Body.TILES: 2}


def attend(
    call: AttendCall, driver: Driver, scratch: Scratch, *, prefill: bool, mma: bool = False
) -> None:
    """Fill ``call.out`` and ``call.lse`` for the rows of the batch; ``mma``: records on tensor
    cores.
    """
    layer, storage, buffers = call.layer, call.buffers.storage, call.buffers
    run = Launches(call, driver, scratch)
    work = _work(call, driver, prefill=prefill, mma=mma)
    partial = run.partials("partial", work.parts, work.rows)
    first = 0
    if mma and work.body:
        run.records(mma_program(layer, storage, work.rows), work, partial)
        first = work.body
    program = attend_program(layer, storage, work.rows, run.q_kind, run.new_kind)
    run.items(program, work, partial, (buffers.k_records, buffers.v_records), first=first)
    run.merge(work, partial)


class Launches:
    """The launches of one attention; what they share is made once."""

    def __init__(self, call: AttendCall, driver: Driver, scratch: Scratch) -> None:
        self._call, self._driver, self._scratch = call, driver, scratch
        self.q_kind = KINDS[driver.see("q", call.q).dtype]
        self.new_kind = KINDS[driver.see("k", call.k).dtype] if call.k is not None else 0
        self._mask_of, self._mask = _masks(call, driver)
        self._shape, self._slopes = _layer_arguments(call.layer, call.buffers, driver)
        self._rotated: Any = None

    def partials(self, name: str, parts: int, rows: int) -> Any:
        """Room for that many partial results of ``rows`` rows."""
        words = parts * rows * (2 + self._call.layer.head_dim_v)
        return self._scratch.get(name, (words,), np.float32)

    def rotated(self, work: Work) -> Any:
        """float32 queries in the rotated domain, times the scale; None when nothing reads them."""
        if self._rotated is None and work.sources & {BODY, EXACT}:
            call, layer = self._call, self._call.layer
            size = (call.batch.n_rows * layer.n_head, layer.head_dim)
            self._rotated = self._scratch.get("rotated queries", size, np.float32)
            args = (call.q, self._rotated, np.float32(layer.scale))
            program = rotate_program(layer, self.q_kind)
            self._driver.launch(program, "rotate_queries", (size[0],), args)
        return self._rotated

    def records(self, program: Program, work: Work, partial: Any) -> None:
        """Items over records, on tensor cores."""
        call, buffers = self._call, self._call.buffers
        args = (
            *self._shape, self._slopes, work.lists, np.int32(0), buffers.k_records,
            buffers.v_records, self.rotated(work), self._mask_of, self._mask, partial,
            np.int32(work.parts), np.float32(call.layer.softcap),
        )  # fmt: skip
        self._driver.launch(program, "attend_mma", (work.body,), args)

    def items(
        self,
        program: Program,
        work: Work,
        partial: Any,
        body: tuple[Any, Any],
        *,
        first: int = 0,
        slots: int | None = None,
    ) -> None:
        """Items from ``first`` on; ``body``: K and V of the body, of ``slots`` slots."""
        if first >= work.items:
            return
        call, buffers = self._call, self._call.buffers
        shape = list(self._shape)
        if slots is not None:
            shape[SHAPE.index("slots")] = np.int32(slots)
        args = (
            *shape, self._slopes, work.lists, np.int32(first), *body, buffers.k_exact,
            buffers.v_exact, buffers.k_ring, buffers.v_ring, call.q, self.rotated(work), call.k,
            call.v, self._mask_of, self._mask, partial, np.int32(work.parts),
            np.float32(call.layer.scale), np.float32(call.layer.softcap),
        )  # fmt: skip
        self._driver.launch(program, "attend", (work.items - first,), args)

    def merge(self, work: Work, partial: Any) -> None:
        """Partial results into ``out`` and ``lse``."""
        call, layer, driver = self._call, self._call.layer, self._driver
        sinks = None if call.sink_logits is None else driver.upload(call.sink_logits)
        args = (
            work.lists, partial, np.int32(work.parts), np.int32(layer.n_head),
            np.int32(layer.gqa), sinks, call.out, call.lse,
        )  # fmt: skip
        program = merge_program(layer, work.rows)
        driver.launch(program, "merge", (work.joins, work.rows), args)


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
    layer: LayerSpec,
    storage: Storage,
    rows: int,
    q_kind: int,
    new_kind: int,
    *,
    window: bool = False,
) -> Program:
    """The attention kernel for a layer's head dims, what it keeps, and the caller's rows;
    ``window``: records come as float32 rows.
    """
    stored = _stored(layer, storage)
    if window:
        stored |= {"BODY": 3, "K_TYPE": 0, "V_TYPE": 0, "K_BYTES": 0, "V_BYTES": 0}
    return Program.of(
        _PARTS, {"attend": THREADS}, ROWS=rows, Q_KIND=q_kind, NEW_KIND=new_kind, **stored
    )


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
        shape = [  # SHAPE
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
