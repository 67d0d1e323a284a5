"""Launch lists of ``sources/attend.inc`` and ``merge.inc``: made once per step and page class,
shared by its layers, one int32 array that travels to the device in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels import tail
from kvkernels.calls import Batch, SeqView
from kvkernels.op import LayerSpec
from kvkernels.storage import Body

Ints = NDArray[np.int32]

# Numbers of the kernel sources: order of the lists' parts, sources of keys.
BODY, EXACT, TILES, RING, CURRENT = range(5)
#: no tail: every key is older than this position
NO_CUT = 2**31 - 1
#: query rows of one block, decode; a prefill's depend on its head dim (registers)
DECODE_BLOCK = 8
#: groups, or runs of a ring, per item of a decode: fixed, so that the order of additions depends on
#: a sequence's own rows only (B7). Longer sequences take more, so that merging stays cheap.
CHUNK, LONG_CHUNK, LONG = 4, 16, 1024


def block_rows(layer: LayerSpec, n_q: int, *, prefill: bool, mma: bool = False) -> int:
    """Query rows of one block: what the kernel is specialised for; results do not depend on it.
    ``mma``: of tensor cores, whose columns are 8 rows.
    """
    if mma:
        wide = max(layer.head_dim, layer.head_dim_v) > 128
        return 8 if wide or n_q * layer.gqa <= 8 else 16
    if prefill:
        return prefill_block(max(layer.head_dim, layer.head_dim_v))
    return min(DECODE_BLOCK, 1 << (n_q * layer.gqa - 1).bit_length())


def prefill_block(widest: int) -> int:
    """Query rows of one block of a prefill, for a head dim."""
    return 16 if widest <= 128 else 8


def chunk_of(groups: int) -> int:
    """Groups per item of a decode over that many."""
    return CHUNK if groups <= LONG else LONG_CHUNK


@dataclass(slots=True)
class Work:
    """``lists``: what the kernels read, on the device once it was uploaded; ``items`` and
    ``joins``: blocks of the two launches; ``rows`` of a block; ``sources``: kinds of keys that
    occur; the first ``body`` items are those over records. ``firsts``: the first part of every
    join.
    """

    lists: Any
    items: int
    joins: int
    rows: int
    sources: frozenset[int]
    body: int
    firsts: tuple[int, ...]

    @property
    def parts(self) -> int:
        """Partial results: each item leaves one."""
        return self.items


class Builder:
    """The lists of one batch for layers of one shape."""

    def __init__(
        self,
        layer: LayerSpec,
        body: Body,
        rows: int,
        *,
        current: bool,
        prefill: bool,
        only_body: bool = False,
    ) -> None:
        self._n_kv_head, self._gqa, self._rows = layer.n_kv_head, layer.gqa, rows
        self._source = {Body.RECORDS: BODY, Body.TILES: TILES, Body.NONE: -1}[body]
        self._current, self._prefill = current, prefill
        self._only_body = only_body
        self._items: list[tuple[int, ...]] = []
        self._joins: list[tuple[int, ...]] = []

    def build(self, batch: Batch, cuts: NDArray[np.int64]) -> Work:
        """``cuts`` [rows of the step]: the oldest row a query takes from its ring."""
        seqs: list[tuple[int, ...]] = []
        tiles: list[tuple[int, ...]] = []
        runs: list[tuple[int, ...]] = []
        tables, table_at = [np.zeros(0, np.int32)], 0
        for s, view in enumerate(batch.views):
            tile, run, ring = len(tiles), len(runs), -1
            tiles += [(t.block, t.base, t.rows, int(t.twin)) for t in view.tiles]
            if view.tail:
                ring = view.tail.ring
                oldest = int(cuts[view.q_start : view.q_start + view.n_q].min())
                found = tail.runs(oldest, view.n_past, view.tail.capacity)
                runs += [(r.slot, r.base, r.rows) for r in found]
            seqs.append(
                (
                    view.q_start, view.n_q, view.n_past, table_at, view.twin_group, tile,
                    len(tiles), run, len(runs), ring,
                )
            )  # fmt: skip
            tables.append(view.table)
            table_at += len(view.table)
            self._sequence(s, view, (tile, len(tiles)), (run, len(runs)))
        items = sorted(self._items, key=lambda item: item[2] != BODY)  # stable
        parts: Sequence[Any] = (
            seqs, items, tiles, runs, np.minimum(cuts, NO_CUT), np.concatenate(tables),
            self._joins,
        )  # fmt: skip
        return Work(
            pack(parts), len(items), len(self._joins), self._rows,
            frozenset(item[2] for item in items), sum(item[2] == BODY for item in items),
            tuple(join[3] for join in self._joins),
        )  # fmt: skip

    def _sequence(
        self, s: int, view: SeqView, tiles: tuple[int, int], runs: tuple[int, int]
    ) -> None:
        total = view.n_q * self._gqa
        for head in range(self._n_kv_head):
            for row in range(0, total, self._rows):
                rows, first = min(self._rows, total - row), len(self._items)
                key = (s, head, row, rows)
                if self._source >= 0:
                    self._add(key, self._source, self._chunks(view.body, chunk_of(view.body[1])))
                if not self._only_body:
                    self._add(key, EXACT, [tiles])
                rotated = len(self._items) - first if self._source == BODY else 0
                if not self._only_body:
                    self._add(key, RING, self._chunks(runs, CHUNK, runs[0]))
                if self._current and not self._only_body:
                    self._add(key, CURRENT, [(0, -(-view.n_q // tail.GROUP))])
                plain = len(self._items) - first - rotated
                self._joins.append((view.q_start, head, rows, first, rotated, plain, row))

    def _chunks(self, span: tuple[int, int], chunk: int, origin: int = 0) -> list[tuple[int, int]]:
        """A prefill's block takes all; a decode's are cut at fixed numbers from ``origin``."""
        start, stop = span
        if self._prefill:
            return [span]
        first = origin + ((start - origin) // chunk + 1) * chunk
        return list(pairwise([start, *range(first, stop, chunk), stop]))

    def _add(
        self, key: tuple[int, int, int, int], source: int, spans: Sequence[tuple[int, int]]
    ) -> None:
        s, head, row, rows = key
        for first, last in spans:
            if first < last:
                self._items.append((s, head, source, first, last, len(self._items), row, rows))


def pack(parts: Sequence[Any]) -> Ints:
    """Begins of the parts, then the parts, as one flat int32 array."""
    flat = [np.asarray(part, np.int32).reshape(-1) for part in parts]
    begins = np.cumsum([len(flat), *(len(part) for part in flat)])[:-1]
    return np.concatenate([begins.astype(np.int32), *flat])
