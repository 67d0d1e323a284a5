"""Entry ``*/attend_materialized``: records become transient float32 rows, a window of tokens at a
time; partial results are folded as they come, so that transient bytes depend on the window and on
query rows, never on both (W1-W3).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from kvkernels.calls import AttendCall, Batch, MaterializeCall, SeqView
from kvkernels.cpu import masks
from kvkernels.op import LayerSpec
from kvkernels.records.layout import GROUP
from kvkernels.simt.attend import THREADS, Launches, attend_program
from kvkernels.simt.driver import Driver
from kvkernels.simt.launch import Builder, Work, block_rows
from kvkernels.simt.materialize import materialize
from kvkernels.simt.program import Program
from kvkernels.simt.scratch import Scratch


def attend_windows(call: AttendCall, driver: Driver, scratch: Scratch) -> None:
    """Fill ``call.out`` and ``call.lse``, one sequence after the other."""
    for view, mask in zip(call.batch.views, call.masks, strict=True):
        one = replace(call, batch=Batch((view,), call.batch.n_rows), masks=(mask,))
        _Sequence(one, driver, scratch).attend()


class _Sequence:
    def __init__(self, call: AttendCall, driver: Driver, scratch: Scratch) -> None:
        self._call, self._driver, self._scratch = call, driver, scratch
        self._layer, self._view = call.layer, call.batch.views[0]
        self._rows = block_rows(self._layer, self._view.n_q, prefill=True)
        self._run = Launches(call, driver, scratch)
        self._program = attend_program(
            self._layer, call.buffers.storage, self._rows, self._run.q_kind, self._run.new_kind,
            window=True,
        )  # fmt: skip

    def attend(self) -> None:
        start, stop = self._view.body
        groups = max(1, self._call.window_chunk // GROUP)
        edges = [*range(start, stop, groups), stop] if start < stop else [start, stop]
        *before, last = itertools.pairwise(edges)
        run, total, blocks = self._run, None, 0
        for span in before:
            # The first result is what the others are folded into.
            name = "window sum" if total is None else "window partial"
            work, partial = self._window(span, name, only_body=True)
            if total is None:
                total, blocks = partial, work.parts
            else:
                self._fold(total, blocks, partial, blocks, None)
        work, partial = self._window(last, "partial", only_body=False)
        if total is not None:
            firsts = self._driver.upload(np.array(work.firsts, np.int32))
            self._fold(partial, work.parts, total, blocks, firsts)
        run.merge(work, partial)

    def _window(self, span: tuple[int, int], name: str, *, only_body: bool) -> tuple[Work, Any]:
        """Partial results of the groups in ``span``; unless ``only_body``, of other keys too."""
        call, driver, layer = self._call, self._driver, self._layer
        begin, end = span
        body = self._body(span)
        batch = Batch((_windowed(self._view, span),), call.batch.n_rows)
        builder = Builder(
            layer, call.buffers.storage.body, self._rows, current=call.k is not None, prefill=True,
            only_body=only_body,
        )  # fmt: skip
        work = builder.build(batch, masks.masked_cuts(batch, layer, call.masks))
        work.lists = driver.upload(work.lists)
        partial = self._run.partials(name, work.parts, work.rows)
        self._run.items(self._program, work, partial, body, slots=end - begin)
        return work, partial

    def _body(self, span: tuple[int, int]) -> tuple[Any, Any]:
        layer, slots = self._layer, self._view.table[slice(*span)]
        shape = (layer.n_kv_head, len(slots) * GROUP, layer.head_dim)
        k, v = (self._scratch.get(f"window {side}", shape, np.float32) for side in "kv")
        materialize(
            self._driver, MaterializeCall(layer, self._call.buffers, slots, k, v, rotated=True)
        )
        return k, v

    def _fold(self, total: Any, total_parts: int, more: Any, more_parts: int, which: Any) -> None:
        args = (total, np.int32(total_parts), more, np.int32(more_parts), which)
        grid = (more_parts, self._rows)
        self._driver.launch(fold_program(self._layer, self._rows), "fold", grid, args)


def _windowed(view: SeqView, span: tuple[int, int]) -> SeqView:
    """The view with the groups of a window only, which lie in its slots in order."""
    table = np.zeros(span[1], np.int32)
    table[span[0] :] = np.arange(span[1] - span[0])
    return replace(view, table=table, body=span)


def fold_program(layer: LayerSpec, rows: int) -> Program:
    """Partial results into others of the same rows."""
    return Program.of(("common", "fold"), {"fold": THREADS}, DIM_V=layer.head_dim_v, ROWS=rows)
