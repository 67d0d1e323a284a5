"""Entries ``cpu/attend_decode`` and ``cpu/attend_prefill``: attention straight from records."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkernels.calls import AttendCall
from kvkernels.cpu import masks
from kvkernels.cpu.entries import compiled
from kvkernels.cpu.launch import constants, work_of
from kvkernels.cpu.pool import ThreadPool
from kvkernels.cpu.scratch import Scratch

_NOTHING = np.zeros(1, np.float32)
_LANES = 64  # what the matrix kernels read at a time


def attend_records(
    call: AttendCall, scratch: Scratch, pool: ThreadPool, isa: str, *, blocks: bool
) -> None:
    """Fill ``call.out`` and ``call.lse`` for the rows of the batch; ``blocks``:
    by blocks of queries (prefill).
    """
    layer, buffers = call.layer, call.buffers
    current = call.k is not None
    work = work_of(call.batch, layer, current=current, blocks=blocks)
    fixed = constants(layer, buffers.slots, buffers.blocks, call.activations, isa)
    seqs, mask = work.seqs, _NOTHING
    if any(m is not None for m in call.masks):
        seqs, mask = masks.flatten(work.seqs, call.batch.views, call.masks, layer.n_head, current)
    k_new, stride = _transposed(call.k, scratch)
    # Only a decode leaves partial results to be merged; a prefill item finishes its own rows.
    parts = 1 if blocks else len(work.items)
    pm = scratch.get("part_max", (parts, work.rows), np.float32)
    pl = scratch.get("part_sum", (parts, work.rows), np.float32)
    po = scratch.get("part_out", (1 if blocks else parts, work.rows * layer.head_dim), np.float32)
    has_sinks = call.sink_logits is not None
    sinks = call.sink_logits if has_sinks else _NOTHING
    out, lse = call.out.reshape(-1), call.lse.reshape(-1)
    arguments = (
        work.items, seqs, work.tiles, work.table, fixed.shape, fixed.dots_k, fixed.dots_v,
        fixed.middles, fixed.mats, call.q.reshape(-1), fixed.scale, fixed.softcap, fixed.slopes,
        mask, buffers.k_records, buffers.k_records.view(np.uint16), buffers.v_records,
        buffers.v_records.view(np.uint16), buffers.k_exact, buffers.v_exact, k_new, stride,
        call.v.reshape(-1) if call.v is not None else _NOTHING, pm, pl, po, sinks, has_sinks, out,
        lse,
    )  # fmt: skip
    run_items = compiled(isa, "attend.run_items")
    pool.ranges(lambda a, b: run_items(a, b, *arguments), len(work.items), least=work.least)
    if not blocks:
        merge = compiled(isa, "merge.merge")
        merge(seqs, work.joins, fixed.shape, sinks, has_sinks, pm, pl, po, out, lse)


def _transposed(k: Any | None, scratch: Scratch) -> tuple[Any, int]:
    """Current K as [n_kv_head, D, padded rows] flat, and its row stride; (nothing, 0) without
    current rows.

    Lanes past the last row hold whatever was there: kernels hide them, they never mix with others.
    """
    if k is None:
        return _NOTHING, 0
    n, heads, dim = k.shape
    stride = -(-n // _LANES) * _LANES + _LANES
    out = scratch.get("k_transposed", (heads, dim, stride), np.float32)
    out[:, :, :n] = k.transpose(1, 2, 0)
    return out.reshape(-1), stride
