"""Work lists for ``kernels/attend.py``: made once per step and page class, shared by its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvkernels.calls import Batch, SeqView
from kvkernels.cpu import masks
from kvkernels.cpu.columns import ALL, BODY, CURRENT, EXACT, F32, I8, I16, ROW_BLOCKS
from kvkernels.cpu.entries import dot_address, matrix_address
from kvkernels.op import LayerSpec
from kvkernels.records.layout import GROUP, HeadLayout, Side

#: sealed groups per work item of a decode: fixed, so that the order of additions never depends on
#: threads or batch
#: mates (B7)
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
    joins: Ints
    table: NDArray[np.int32]
    rows: int
    least: int
    packed: Ints | None = None
    packed_joins: tuple[Ints, Ints] | None = None


def work_of(batch: Batch, layer: LayerSpec, *, current: bool, blocks: bool) -> Work:
    """The lists for this batch; ``blocks``: by blocks of queries (prefill) instead of chunks of
    keys (decode).
    """
    # Everything of a layer that the lists, or what is packed of them, depend on.
    key = ("cpu", layer.n_kv_head, layer.gqa, layer.head_dim, current, blocks)
    if key not in batch.prepared:
        batch.prepared[key] = _Builder(layer.n_kv_head, layer.gqa, current, blocks).build(batch)
    work: Work = batch.prepared[key]
    return work


class _Builder:
    def __init__(self, n_kv_head: int, gqa: int, current: bool, blocks: bool) -> None:
        self.n_kv_head, self.gqa, self.current, self.blocks = n_kv_head, gqa, current, blocks
        self.items: list[tuple[int, ...]] = []
        self.joins: list[tuple[int, ...]] = []

    def build(self, batch: Batch) -> Work:
        seqs: list[tuple[int, ...]] = []
        tiles: list[tuple[int, ...]] = []
        tables, table_at, rows = [], 0, 0
        for s, v in enumerate(batch.views):
            first = len(tiles)
            tiles += [(t.block, t.base, t.rows, int(t.twin)) for t in v.tiles]
            seqs.append(
                (v.q_start, v.n_q, v.n_past, table_at, v.twin_group, -1, 0, 0, first, len(tiles))
            )
            tables.append(v.table)
            table_at += len(v.table)
            step = max(1, ROW_BLOCK // self.gqa) if self.blocks else v.n_q
            rows = max(rows, min(step, v.n_q) * self.gqa)
            for h in range(self.n_kv_head):
                if self.blocks:
                    self._prefill(s, h, v, step)
                else:
                    self._decode(s, h, v)
        return Work(
            np.array(seqs, np.int64),
            np.array(self.items, np.int64).reshape(-1, 8),
            np.array(tiles, np.int64).reshape(-1, 4),
            np.array(self.joins, np.int64),
            np.concatenate(tables) if table_at else np.zeros(1, np.int32),
            rows,
            self._least(batch.views),
        )

    def _least(self, views: Sequence[SeqView]) -> int:
        """Items worth a thread of their own: waking one costs as much as some dozens of tiles."""
        tiles = sum((v.body[1] - v.body[0] + len(v.tiles)) * v.n_q for v in views) * self.gqa
        tiles *= self.n_kv_head
        return max(1, len(self.items) * _TILES_PER_THREAD // max(tiles, 1))

    def _item(self, s: int, h: int, kind: int, a: int, b: int, q: int, queries: int) -> None:
        self.items.append((s, h, kind, a, b, len(self.items), q, queries))

    def _prefill(self, s: int, h: int, v: SeqView, step: int) -> None:
        for q in range(0, v.n_q, step):
            queries = min(step, v.n_q - q)
            self.joins.append((s, h, q, queries, len(self.items), 0, 1))
            self._item(s, h, ALL, *v.body, q, queries)

    def _decode(self, s: int, h: int, v: SeqView) -> None:
        begin, (start, stop) = len(self.items), v.body
        # Chunk edges sit on fixed group numbers, so a longer context keeps the shorter one's
        # partial sums.
        edges = [start, *range((start // CHUNK + 1) * CHUNK, stop, CHUNK), stop]
        for a, b in pairwise(edges):
            if a < b:
                self._item(s, h, BODY, a, b, 0, v.n_q)
        if v.tiles:
            self._item(s, h, EXACT, 0, 0, 0, v.n_q)
        rotated = len(self.items) - begin
        if self.current:
            self._item(s, h, CURRENT, 0, 0, 0, v.n_q)
        self.joins.append((s, h, 0, v.n_q, begin, rotated, int(self.current)))


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


@lru_cache(maxsize=256)
def constants(layer: LayerSpec, slots: int, blocks: int, activations: str, isa: str) -> Constants:
    """Geometry and kernel addresses of a layer; compiles the micro-kernels it needs."""
    assert layer.k_bits is not None
    assert layer.v_bits is not None
    k = HeadLayout(Side.K, layer.k_bits, layer.head_dim)
    v = HeadLayout(Side.V, layer.v_bits, layer.head_dim)
    window = layer.window or 0
    k_mode, v_mode = modes(layer.v_bits, activations, isa)
    shape = [
        layer.n_head, layer.n_kv_head, layer.head_dim, k.slice_width, window,
        min(GROUP, window) if window else GROUP, 1, k.record.nbytes, v.record.nbytes,
        slots, blocks, _MODES[k_mode], _MODES[v_mode],
    ]  # fmt: skip
    addresses = [
        [dot_address(bits, rows, mode, isa) for rows in ROW_BLOCKS]
        for bits, mode in ((layer.k_bits, k_mode), (layer.v_bits, v_mode))
    ]
    mats = [matrix_address(rows, half, isa) for half in (1, 0) for rows in ROW_BLOCKS]
    middle = [(2**bits - 1) / 2 for bits in (layer.k_bits, layer.v_bits)]
    return Constants(
        np.array(shape, np.int64),
        np.array(addresses[0], np.int64),
        np.array(addresses[1], np.int64),
        np.array(middle, np.float32),
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
