"""Entries ``cpu/attend_decode`` and ``cpu/attend_prefill``: attention straight from records."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkernels.calls import AttendCall
from kvkernels.cpu import masks
from kvkernels.cpu.ahead.runtime import AheadKernel
from kvkernels.cpu.entries import compiled
from kvkernels.cpu.launch import constants, work_of
from kvkernels.cpu.pool import ThreadPool
from kvkernels.cpu.scratch import Scratch

_NOTHING = np.zeros(1, np.float32)
_LANES = 64  # what the matrix kernels read at a time
_RANGE = 2  # arguments before those a layer passes: which items
#: first argument of the step, and of the call, after those of the layer
_STEP, _CALL = 18, 22


def attend_records(
    call: AttendCall, scratch: Scratch, pool: ThreadPool, isa: str, *, blocks: bool
) -> None:
    """Fill ``call.out`` and ``call.lse`` for the rows of the batch; ``blocks``:
    by blocks of queries (prefill).
    """
    layer, buffers = call.layer, call.buffers
    current = call.k is not None
    masked = any(m is not None for m in call.masks)
    cuts = None
    if masked and any(view.tail for view in call.batch.views):
        cuts = masks.masked_cuts(call.batch, layer, call.masks)
    work = work_of(call.batch, layer, buffers.storage.body, cuts, current=current, blocks=blocks)
    seqs, mask = work.seqs, _NOTHING
    if masked:
        seqs, mask = masks.flatten(work.seqs, call.batch.views, call.masks, layer.n_head, current)
    k_new = v_new = _NOTHING
    stride = 0
    if call.k is not None and call.v is not None:
        # A decode has few rows and takes them as they lie.
        k_new, stride = _transposed(call.k, scratch) if blocks else (call.k.reshape(-1), 1)
        v_new = call.v.reshape(-1)
    # Only a decode leaves partial results to be merged; a prefill item finishes its own rows.
    parts = 1 if blocks else len(work.items)
    size = work.rows * layer.head_dim_v
    partial = scratch.get("partial", (parts * (2 * work.rows + size),), np.float32)
    edge = parts * work.rows
    pm = partial[:edge].reshape(parts, work.rows)
    pl = partial[edge : 2 * edge].reshape(parts, work.rows)
    po = partial[2 * edge :].reshape(parts, size)
    has_sinks = call.sink_logits is not None
    sinks = call.sink_logits if has_sinks else _NOTHING
    finish = (pm, pl, po, sinks, has_sinks, call.out.reshape(-1), call.lse.reshape(-1))
    start = (seqs, work.cuts, mask, call.q.reshape(-1), k_new, stride, v_new)
    run_items = compiled(isa, "attend.run_items")
    merge = compiled(isa, "merge.merge")
    fixed = _layer_arguments(call, isa)
    if isinstance(run_items, AheadKernel):
        # Most arguments are the same in every launch of a layer or for every layer of a step.
        key = ("packed", call.activations, isa)
        if key not in buffers.prepared:
            buffers.prepared[key] = run_items.pack(_RANGE, *fixed)
        if work.packed is None:
            work.packed = run_items.pack(_STEP, *work.lists)
        own = run_items.pack(_CALL, *start, *finish)
        slots = np.concatenate((_HEAD, buffers.prepared[key], work.packed, own))
        pool.items(run_items, slots, len(work.items), least=work.least)
        if not blocks:
            if work.packed_joins is None:
                joins = merge.pack(0, fixed[0], work.joins, work.seqs)
                work.packed_joins = joins, fixed[0]
            joins = work.packed_joins[0]
            merge.launch(np.concatenate((_HEAD[:1], joins, own[-_FINISH_SLOTS:])))
        return
    arguments = (*fixed, *work.lists, *start, *finish)
    pool.ranges(lambda a, b: run_items(a, b, *arguments), len(work.items), least=work.least)
    if not blocks:
        merge(fixed[0], work.joins, work.seqs, *finish)


_HEAD = np.zeros(1 + _RANGE, np.int64)
# pm, pl, po with two extents each; sinks, out, lse with one; has_sinks without
_FINISH_SLOTS = 3 * 3 + 3 * 2 + 1


def _layer_arguments(call: AttendCall, isa: str) -> tuple[Any, ...]:
    buffers = call.buffers
    key = ("arguments", call.activations, isa)
    if key not in buffers.prepared:
        fixed = constants(call.layer, buffers.storage, buffers.pages, call.activations, isa)
        buffers.prepared[key] = (
            fixed.shape, fixed.dots_k, fixed.dots_v, fixed.middles, fixed.mats, fixed.scale,
            fixed.softcap, fixed.slopes, buffers.k_records, buffers.k_records.view(np.uint16),
            buffers.v_records, buffers.v_records.view(np.uint16), buffers.k_exact, buffers.v_exact,
            buffers.k_ring, buffers.v_ring,
        )  # fmt: skip
    arguments: tuple[Any, ...] = buffers.prepared[key]
    return arguments


def _transposed(k: Any, scratch: Scratch) -> tuple[Any, int]:
    """Current K as [n_kv_head, D, padded rows] flat, and its row stride.

    Lanes past the last row hold whatever was there: kernels hide them, they never mix with others.
    """
    n, heads, dim = k.shape
    stride = -(-n // _LANES) * _LANES + _LANES
    out = scratch.get("k_transposed", (heads, dim, stride), np.float32)
    out[:, :, :n] = k.transpose(1, 2, 0)
    return out.reshape(-1), stride
