"""Work lists for ``kernels/attend.py``: made once per step and page class, shared by its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvkernels import tail
from kvkernels.calls import Batch, SeqView
from kvkernels.cpu import masks
from kvkernels.cpu.columns import (
    ALL,
    BODY,
    CURRENT,
    EXACT,
    F32,
    I8,
    I16,
    RING,
    ROW_BLOCKS,
    STANDARD,
    TILES,
)
from kvkernels.cpu.entries import dot_address, matrix_address
from kvkernels.memory import ring_slots
from kvkernels.op import KVARN_BITS, WINDOW_KINDS, LayerSpec
from kvkernels.quants import block_type
from kvkernels.quants.tiles import TileLayout
from kvkernels.records.layout import GROUP, HeadLayout, Side
from kvkernels.storage import Body, Pages, Storage

#: groups per work item of a decode, or runs of a ring: fixed, so that the order of additions never
#: depends on threads or batch mates (B7)
CHUNK = 16
#: query rows (queries x heads of a KV head) per work item of a prefill: codes stay in cache for all
#: of them
ROW_BLOCK = 32

#: (row, tile) products below which a second thread does not pay
_TILES_PER_THREAD = 128

Ints = NDArray[np.int64]
_MODES = {"f32": F32, "i8": I8, "i16": I16}


@dataclass(slots=True)
class Work:
    """Launch lists of one batch (columns in ``kernels/attend.py`` and ``merge.py``); ``packed``
    and ``packed_joins``: those that no call changes, in the form of shipped kernels (the latter
    with the layer's ``shape``, whose address it holds).
    """

    seqs: Ints
    items: Ints
    tiles: Ints
    runs: Ints
    cuts: Ints
    joins: Ints
    table: NDArray[np.int32]
    rows: int
    least: int
    packed: Ints | None = None
    packed_joins: tuple[Ints, Ints] | None = None

    @property
    def lists(self) -> tuple[Ints, Ints, Ints, NDArray[np.int32]]:
        """What every layer of the step passes."""
        return self.items, self.tiles, self.runs, self.table


def work_of(
    batch: Batch, layer: LayerSpec, body: Body, cuts: Ints | None, *, current: bool, blocks: bool
) -> Work:
    """The lists for this batch; ``blocks``: by blocks of queries (prefill) instead of chunks of
    keys (decode). ``cuts``: the oldest row a query takes from the ring, when a mask decides that.
    """
    # Everything of a layer that the lists, or what is packed of them, depend on.
    dims = (layer.head_dim, layer.head_dim_v)
    key = ("cpu", layer.n_kv_head, layer.gqa, dims, layer.causal, body, current, blocks)
    if cuts is not None:
        return _Builder(layer, body, current, blocks).build(batch, cuts)
    if key not in batch.prepared:
        made = _Builder(layer, body, current, blocks).build(batch, masks.newest_cuts(batch, layer))
        batch.prepared[key] = made
    work: Work = batch.prepared[key]
    return work


class _Builder:
    def __init__(self, layer: LayerSpec, body: Body, current: bool, blocks: bool) -> None:
        self.n_kv_head, self.gqa = layer.n_kv_head, layer.gqa
        self.body = BODY if body is Body.RECORDS else TILES
        self.current, self.blocks = current, blocks
        self.items: list[tuple[int, ...]] = []
        self.joins: list[tuple[int, ...]] = []

    def build(self, batch: Batch, cuts: Ints) -> Work:
        seqs: list[tuple[int, ...]] = []
        tiles: list[tuple[int, ...]] = []
        runs: list[tuple[int, ...]] = []
        tables, table_at, rows = [], 0, 0
        for s, v in enumerate(batch.views):
            tile, run = len(tiles), len(runs)
            tiles += [(t.block, t.base, t.rows, int(t.twin)) for t in v.tiles]
            ring = -1
            if v.tail:
                ring = v.tail.ring
                oldest = int(cuts[v.q_start : v.q_start + v.n_q].min())
                found = tail.runs(oldest, v.n_past, v.tail.capacity)
                runs += [(r.slot, r.base, r.rows) for r in found]
            seqs.append(
                (
                    v.q_start, v.n_q, v.n_past, table_at, v.twin_group, -1, 0, 0, tile, len(tiles),
                    run, len(runs), ring,
                )
            )  # fmt: skip
            tables.append(v.table)
            table_at += len(v.table)
            step = max(1, ROW_BLOCK // self.gqa) if self.blocks else v.n_q
            rows = max(rows, min(step, v.n_q) * self.gqa)
            for h in range(self.n_kv_head):
                if self.blocks:
                    self._prefill(s, h, v, step)
                else:
                    self._decode(s, h, v, (run, len(runs)))
        return Work(
            np.array(seqs, np.int64),
            np.array(self.items, np.int64).reshape(-1, 8),
            np.array(tiles, np.int64).reshape(-1, 4),
            np.array(runs, np.int64).reshape(-1, 3),
            cuts,
            np.array(self.joins, np.int64),
            np.concatenate(tables) if table_at else np.zeros(1, np.int32),
            rows,
            self._least(batch.views, len(runs)),
        )

    def _least(self, views: Sequence[SeqView], n_runs: int) -> int:
        """Items worth a thread of their own: waking one costs as much as some dozens of tiles."""
        tiles = sum((v.body[1] - v.body[0] + len(v.tiles)) * v.n_q for v in views)
        tiles += n_runs * max(v.n_q for v in views)
        tiles *= self.gqa * self.n_kv_head
        return max(1, len(self.items) * _TILES_PER_THREAD // max(tiles, 1))

    def _item(self, s: int, h: int, kind: int, a: int, b: int, q: int, queries: int) -> None:
        self.items.append((s, h, kind, a, b, len(self.items), q, queries))

    def _prefill(self, s: int, h: int, v: SeqView, step: int) -> None:
        for q in range(0, v.n_q, step):
            queries = min(step, v.n_q - q)
            self.joins.append((s, h, q, queries, len(self.items), 0, 1))
            self._item(s, h, ALL, *v.body, q, queries)

    def _decode(self, s: int, h: int, v: SeqView, runs: tuple[int, int]) -> None:
        begin = len(self.items)
        self._chunks(s, h, self.body, v.body, v.n_q)
        if v.tiles:
            self._item(s, h, EXACT, 0, 0, 0, v.n_q)
        rotated = len(self.items) - begin if self.body == BODY else 0
        for a in range(runs[0], runs[1], CHUNK):
            self._item(s, h, RING, a, min(a + CHUNK, runs[1]), 0, v.n_q)
        if self.current:
            self._item(s, h, CURRENT, 0, 0, 0, v.n_q)
        plain = len(self.items) - begin - rotated
        self.joins.append((s, h, 0, v.n_q, begin, rotated, plain))

    def _chunks(self, s: int, h: int, kind: int, groups: tuple[int, int], n_q: int) -> None:
        # Chunk edges sit on fixed group numbers, so a longer context keeps the shorter one's
        # partial sums.
        start, stop = groups
        edges = [start, *range((start // CHUNK + 1) * CHUNK, stop, CHUNK), stop]
        for a, b in pairwise(edges):
            if a < b:
                self._item(s, h, kind, a, b, 0, n_q)


@dataclass(frozen=True, slots=True)
class Constants:
    """What a layer passes to the kernels in every launch."""

    shape: Ints
    dots_k: Ints
    dots_v: Ints
    middles: NDArray[np.float32]
    mats: Ints
    scale: np.float32
    softcap: np.float32
    slopes: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _SideFacts:
    """How the kernels take one side of a body."""

    nbytes: int
    kind: int
    bits: int
    middle: float


def _side(layer: LayerSpec, storage: Storage, side: Side) -> _SideFacts:
    dim = layer.head_dim if side is Side.K else layer.head_dim_v
    name = storage.k if side is Side.K else storage.v
    if storage.body is Body.RECORDS:
        bits = KVARN_BITS[name]
        return _SideFacts(HeadLayout(side, bits, dim).record.nbytes, -1, bits, (2**bits - 1) / 2)
    bits = block_type(name).bits if block_type(name).quantised else 0
    nbytes = TileLayout(side, name, dim).nbytes if storage.body is Body.TILES else 0
    return _SideFacts(nbytes, STANDARD[name], bits, 0.0)


@lru_cache(maxsize=256)
def constants(
    layer: LayerSpec, storage: Storage, pages: Pages, activations: str, isa: str
) -> Constants:
    """Geometry and kernel addresses of a layer; compiles the micro-kernels it needs."""
    k, v = (_side(layer, storage, side) for side in Side)
    window = layer.window or 0
    k_mode, v_mode = modes(v.bits, activations, isa)
    slice_width = min(layer.head_dim, 128)
    ring_k, ring_v = (STANDARD[t] if storage.tail_rows else 0 for t in storage.ring_types)
    shape = [
        layer.n_head, layer.n_kv_head, layer.head_dim, layer.head_dim_v, slice_width, window,
        WINDOW_KINDS.index(layer.window_kind), int(layer.causal),
        min(GROUP, window) if window else GROUP, int(storage.body is Body.RECORDS), k.nbytes,
        v.nbytes, pages.slots, pages.blocks, _MODES[k_mode], _MODES[v_mode], k.kind, v.kind,
        pages.rings, storage.capacity, ring_slots(storage), ring_k, ring_v,
    ]  # fmt: skip
    addresses = [
        [dot_address(side.bits, rows, mode, isa) if side.bits else 0 for rows in ROW_BLOCKS]
        for side, mode in ((k, k_mode), (v, v_mode))
    ]
    mats = [matrix_address(rows, kind, isa) for kind in range(3) for rows in ROW_BLOCKS]
    return Constants(
        np.array(shape, np.int64),
        np.array(addresses[0], np.int64),
        np.array(addresses[1], np.int64),
        np.array([k.middle, v.middle], np.float32),
        np.array(mats, np.int64),
        np.float32(layer.scale),
        np.float32(layer.softcap),
        masks.slopes(layer.n_head, layer.alibi),
    )


def modes(v_bits: int, activations: str, isa: str) -> tuple[str, str]:
    """(mode of QK^T, mode of PV) for a plan's ``activations`` (codec.md 5c).

    auto: int16 scores, because they are exponentiated; int8 for PV where the record's own error
    hides it. Without byte instructions float32 is both faster and exact.
    """
    if activations == "auto":
        if isa == "generic":
            return "f32", "f32"
        return "i16", "i8" if v_bits <= 4 else "i16"
    mode = {"int8": "i8", "int16": "i16", "f32": "f32"}[activations]
    return mode, mode
