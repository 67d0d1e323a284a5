"""Entry ``cpu/attend_materialized``: any number of query rows, through BLAS; reference and
fallback.

Records are decoded into a transient float32 window of one KV head at a time (W1); scores exist only
for a block of query rows by a block of keys, so transient bytes do not depend on n_q * n_kv (W3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.calls import AttendCall, SeqView
from kvkernels.cpu import masks
from kvkernels.cpu.columns import BODY, CURRENT, EXACT, NO_CUT
from kvkernels.cpu.entries import compiled
from kvkernels.cpu.launch import constants
from kvkernels.cpu.scratch import Scratch
from kvkernels.op import LayerSpec
from kvkernels.records.layout import GROUP, HeadLayout, Side

ROW_BLOCK, KEY_BLOCK = 256, 512
Floats = NDArray[np.float32]
_NO_MASK = np.zeros(1, np.float32)


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive keys of one source: K and V rows [n, D], position of the first,
    and how they are seen.
    """

    k: Floats
    v: Floats
    base: int
    twin: bool
    source: int


def attend_window(call: AttendCall, scratch: Scratch, isa: str) -> None:
    """Fill ``call.out`` and ``call.lse`` for the rows of the batch, sequence by sequence."""
    for view, mask in zip(call.batch.views, call.masks, strict=True):
        for head in range(call.layer.n_kv_head):
            _one_head(call, view, mask, head, scratch, isa)


def _one_head(
    call: AttendCall, view: SeqView, mask: Any, head: int, scratch: Scratch, isa: str
) -> None:
    layer, dim, gqa = call.layer, call.layer.head_dim, call.layer.gqa
    rows = slice(view.q_start, view.q_start + view.n_q)
    heads = slice(head * gqa, (head + 1) * gqa)
    n = view.n_q * gqa
    q = scratch.get("q", (n, dim), np.float32)
    np.multiply(call.q[rows, heads], np.float32(layer.scale), out=q.reshape(-1, gqa, dim))
    q_rotated = scratch.get("q_rotated", (n, dim), np.float32)
    rotate_rows = compiled(isa, "rotate.rotate_rows")
    rotate_rows(q, q_rotated)
    state = _State(
        m=scratch.get("m", (n,), np.float32),
        lsum=scratch.get("lsum", (n,), np.float32),
        alpha=scratch.get("alpha", (n,), np.float32),
        scores=scratch.get("scores", (ROW_BLOCK * KEY_BLOCK,), np.float32),
        delta=scratch.get("delta", (ROW_BLOCK, dim), np.float32),
    )
    state.m.fill(-np.inf)
    state.lsum.fill(0)
    shape = constants(layer, call.buffers.storage, call.buffers.pages, "f32", "generic").shape
    o = scratch.get("o", (n, dim), np.float32)
    o.fill(0)
    block = _Block(layer, view, mask, head, shape, state, compiled(isa, "prefill.softmax_block"))
    for run in _past(call, view, head, scratch, isa):
        block.add(q_rotated, run, o)
    rotated = scratch.get("o_back", (n, dim), np.float32)
    # Everything so far lives in the rotated domain; the current rows are added un-rotated on top.
    rotate_rows(o, rotated)
    if call.k is not None and call.v is not None:
        block.add(
            q, _Run(call.k[rows, head], call.v[rows, head], view.n_past, False, CURRENT), rotated
        )
    if call.sink_logits is not None:
        _add_sink(np.tile(call.sink_logits[heads], view.n_q), state, rotated)
    seen = state.lsum > 0
    rotated *= np.divide(1, state.lsum, out=np.zeros_like(state.lsum), where=seen)[:, None]
    call.out[rows, heads] = rotated.reshape(-1, gqa, dim)
    lse = np.full(n, -np.inf, np.float32)
    lse[seen] = state.m[seen] + np.log(state.lsum[seen])
    call.lse[rows, heads] = lse.reshape(-1, gqa)


def _add_sink(sink: Floats, state: _State, o: Floats) -> None:
    """A sink logit joins the denominator only (B2)."""
    top = np.maximum(state.m, sink)
    keep = np.exp(state.m - top)
    o *= keep[:, None]
    state.lsum *= keep
    state.lsum += np.exp(sink - top)
    state.m[:] = top


def _past(call: AttendCall, view: SeqView, head: int, scratch: Scratch, isa: str) -> Iterator[_Run]:
    """Everything before the current rows: sinks, then record windows,
    then the newest exact rows.
    """
    layer, dim, buffers = call.layer, call.layer.head_dim, call.buffers
    k_exact = buffers.k_exact.reshape(layer.n_kv_head, -1, dim, GROUP)
    v_exact = buffers.v_exact.reshape(layer.n_kv_head, -1, GROUP, dim)
    start, stop = view.body
    for t in view.tiles:
        yield _Run(
            k_exact[head, t.block, :, : t.rows].T.view(np.float16).astype(np.float32),
            v_exact[head, t.block, : t.rows].view(np.float16).astype(np.float32),
            t.base,
            t.twin,
            EXACT,
        )
    groups = max(1, call.window_chunk // GROUP)
    width = min(groups, stop - start)
    k = scratch.get("window_k", (width * GROUP, dim), np.float32)
    v = scratch.get("window_v", (width * GROUP, dim), np.float32)
    # The group that also has exact rows is seen by age, so it must stay a run of its own.
    edges = [*range(start, stop, groups), stop]
    if start <= view.twin_group < stop:
        edges = sorted({*edges, view.twin_group, view.twin_group + 1})
    for a, b in pairwise(edges):
        slots = view.table[a:b]
        materialize_head(layer, buffers, slots, head, k, v, isa)
        n = (b - a) * GROUP
        yield _Run(k[:n], v[:n], a * GROUP, a == view.twin_group, BODY)


def materialize_head(
    layer: LayerSpec,
    buffers: Any,
    slots: NDArray[np.int32],
    head: int,
    k: Floats,
    v: Floats,
    isa: str,
) -> None:
    """Decode one KV head's record slots into rotated float32 rows, ``len(slots) * 128`` of them."""
    assert layer.k_bits is not None
    assert layer.v_bits is not None
    for side, bits, pool, rows in (
        (Side.K, layer.k_bits, buffers.k_records, k),
        (Side.V, layer.v_bits, buffers.v_records, v),
    ):
        nbytes = HeadLayout(side, bits, layer.head_dim).nbytes
        records = pool.reshape(layer.n_kv_head, -1, nbytes)[head]
        for i, slot in enumerate(slots):
            compiled(isa, "lines.decode_head")(
                records[slot],
                side is Side.V,
                bits,
                layer.head_dim,
                rows[i * GROUP : (i + 1) * GROUP],
            )


@dataclass(slots=True)
class _State:
    """Running softmax of all rows of one KV head, and the block buffers."""

    m: Floats
    lsum: Floats
    alpha: Floats
    scores: Floats
    delta: Floats


@dataclass(slots=True)
class _Block:
    """Adds runs of keys to the running softmax, one block of rows by one block of keys at a
    time.
    """

    layer: LayerSpec
    view: SeqView
    mask: Any
    head: int
    shape: NDArray[np.int64]
    state: _State
    softmax_block: Any

    def add(self, q: Floats, run: _Run, o: Floats) -> None:
        """o = o * alpha + softmax block @ V for every row block that sees something of the run."""
        state, gqa, n_keys = self.state, self.layer.gqa, len(run.k)
        slopes = masks.slopes(self.layer.n_head, self.layer.alibi)
        step = max(1, ROW_BLOCK // gqa) * gqa
        if step > ROW_BLOCK:
            state.scores = np.empty(step * KEY_BLOCK, np.float32)
            state.delta = np.empty((step, q.shape[1]), np.float32)
        for key in range(0, n_keys, KEY_BLOCK):
            n = min(KEY_BLOCK, n_keys - key)
            k = np.ascontiguousarray(run.k[key : key + n])
            v = np.ascontiguousarray(run.v[key : key + n])
            width = -(-n // 16) * 16
            for row in range(0, len(q), step):
                size = min(step, len(q) - row)
                first, last = row // gqa, (row + size - 1) // gqa
                if not self._any_visible(first, last, run, key, n):
                    continue
                scores = state.scores[: size * width].reshape(size, width)
                np.matmul(q[row : row + size], k.T, out=scores[:, :n])
                mask, mask_head, mask_row = self._mask(first, last, run.base + key, n)
                part = slice(row, row + size)
                self.softmax_block(
                    scores.reshape(-1), width, self.shape, self.view.n_past, first,
                    self.head * gqa, run.base + key, n, run.twin, run.source,
                    np.float32(self.layer.softcap), slopes, mask, mask_head, mask_row,
                    state.m[part], state.lsum[part], state.alpha[part],
                )  # fmt: skip
                delta = np.matmul(scores[:, :n], v, out=state.delta[:size])
                o[part] *= state.alpha[part, None]
                o[part] += delta

    def _any_visible(self, first: int, last: int, run: _Run, key: int, n: int) -> bool:
        # Imports Numba; the reference and fallback route may.
        from kvkernels.cpu.kernels.tiles import visible

        base = run.base + key
        for query in (first, last):
            low, high = visible(
                self.shape, self.view.n_past + query, base, n, run.twin, run.source, NO_CUT
            )
            if low < high:
                return True
        # A window can lie strictly between the first and the last query's.
        return self.layer.window is not None and last - first > 1

    def _mask(self, first: int, last: int, base: int, n: int) -> tuple[Floats, int, int]:
        if self.mask is None:
            return _NO_MASK, -1, 0
        array = np.asarray(self.mask)
        array = array.reshape((1,) * (3 - array.ndim) + array.shape)
        n_q = last - first + 1
        if array.shape[1] > 1:
            array = array[:, first : last + 1]
        if array.shape[2] > 1:
            array = array[:, :, base : base + n]
        flat = masks.additive(array, (self.layer.n_head, n_q, n))
        heads, queries, keys = flat.shape
        return (
            flat.reshape(-1),
            queries * keys if heads > 1 else 0,
            keys if queries > 1 else 0,
        )
