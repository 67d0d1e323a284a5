"""What a device is asked to run: plain arguments of each operation kind,
the same for every backend.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvkernels.op import LayerSpec
from kvkernels.records.layout import GROUP
from kvkernels.storage import Pages, Storage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Table = NDArray[np.int32]


#: most query rows of one sequence in a decode; with more, its launch is a prefill. The split
#: depends only
#: on a sequence's own rows, so that its result is the same alone or in company (B7).
DECODE_ROWS = 16


@dataclass(frozen=True, slots=True)
class GroupWrite:
    """What a commit does with one group: rows ``row .. row + rows`` come from step rows ``source
    ..``.

    ``block``: exact block that keeps the rows, -1 = none (the group is sealed from a transient
    tile). ``base``: block that holds rows ``0 .. row`` now; different from ``block`` when they must
    be copied first. ``slot``: record slot to seal the completed group into, -1 = not sealed.
    """

    group: int
    source: int
    row: int
    rows: int
    block: int
    base: int
    slot: int


@dataclass(frozen=True, slots=True)
class Tile:
    """One run of exact rows: block, position of its first row, rows,
    and whether a record holds them too.
    """

    block: int
    base: int
    rows: int
    twin: bool


@dataclass(frozen=True, slots=True)
class TailView:
    """The ring of one sequence as attention sees it: rows ``start .. n_past`` are in it, a query
    takes the ``rows`` newest visible ones.
    """

    ring: int
    start: int
    rows: int
    capacity: int


@dataclass(frozen=True, slots=True)
class TailWrite:
    """What a commit does with one ring: step rows ``source .. source + rows`` go to ``slot`` on.

    ``base``: ring to copy first (a fork that now goes its own way), -1 = none.
    """

    ring: int
    base: int
    source: int
    slot: int
    rows: int


@dataclass(frozen=True, slots=True)
class SeqView:
    """What attention sees of one sequence in one class: published pages,
    and where its query rows are. ``body``: groups ``first .. last`` of ``table``.
    """

    seq: int
    q_start: int
    n_q: int
    n_past: int
    table: Table
    body: tuple[int, int]
    tiles: tuple[Tile, ...] = ()
    tail: TailView | None = None

    @property
    def twin_group(self) -> int:
        """The sealed group whose exact rows are resident too, or -1."""
        return next((t.base // GROUP for t in self.tiles if t.twin), -1)


@dataclass(frozen=True, slots=True)
class LayerBuffers:
    """Device memory of one layer.

    k_records, v_records: uint8 [n_kv_head, slots, head bytes], records in ``layout`` or tiles of
    standard types (``quants/tiles.py``); k_ring, v_ring: uint16 [n_kv_head, rings, tiles, D, 128]
    and [n_kv_head, rings, rows, D_v], un-rotated rows of the precision tail; k_exact: fp16
    [n_kv_head, blocks, D, 128], v_exact: fp16 [n_kv_head, blocks, 128, D], both rotated; q_exact:
    fp16 [n_head, blocks, D, 128], rotated, or None when queries are not staged. One KV head's
    records are contiguous, heads are never interleaved (codec.md 5b). query_moment: float64
    [n_kv_head, D, D] of un-rotated queries, which replaces staged ones for the aware encoder.
    ``prepared`` is for a backend to keep what it derives from that.
    """

    k_records: Any
    v_records: Any
    k_exact: Any
    v_exact: Any
    q_exact: Any | None
    storage: Storage
    pages: Pages
    k_ring: Any | None = None
    v_ring: Any | None = None
    layout: str = "line"
    query_moment: Any | None = None
    prepared: dict[Hashable, Any] = field(default_factory=dict, compare=False)

    @property
    def slots(self) -> int:
        """Record slots, or tiles."""
        return self.pages.slots

    @property
    def blocks(self) -> int:
        """Exact blocks."""
        return self.pages.blocks


@dataclass(slots=True)
class Batch:
    """The sequences of one launch; shared by all layers of a page class in one step.

    ``prepared`` is for a backend to keep what it derives from the views (launch lists, uploaded
    tables), so that host work happens once per step.
    """

    views: tuple[SeqView, ...]
    n_rows: int
    prepared: dict[Hashable, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttendCall:
    """Attention of one layer. q [n_rows, n_head, D], k and v [n_rows, n_kv_head, D] float32,
    un-rotated.

    ``masks[i]`` belongs to ``batch.views[i]``: None, or bool (True = visible) or additive float,
    broadcastable to [n_head, n_q, n_kv]. ``out`` [n_rows, n_head, D] float32 and ``lse`` [n_rows,
    n_head] float32 (natural log, -inf where nothing is visible) are written for the rows of the
    views only. k and v may be None: no current rows.
    """

    layer: LayerSpec
    buffers: LayerBuffers
    batch: Batch
    q: Any
    k: Any | None
    v: Any | None
    out: Any
    lse: Any
    masks: tuple[Any | None, ...]
    sink_logits: Any | None
    window_chunk: int
    activations: str = "auto"


@dataclass(frozen=True, slots=True)
class TailCall:
    """Write new rows into rings, after everything else of a step (T10). k, v as in CommitCall."""

    layer: LayerSpec
    buffers: LayerBuffers
    writes: tuple[TailWrite, ...]
    k: Any
    v: Any


@dataclass(frozen=True, slots=True)
class CommitCall:
    """Stage new rows and seal the groups they complete, or write them into tiles of standard types;
    touches only pages no published state shows.

    k, v: float32 [n_rows, n_kv_head, D]; q: float32 [n_rows, n_head, D] or None. Rows are rotated,
    rounded to fp16, and only then quantised (codec.md section 2), by the layer's encoder.
    """

    layer: LayerSpec
    buffers: LayerBuffers
    writes: tuple[GroupWrite, ...]
    k: Any
    v: Any
    q: Any | None


@dataclass(frozen=True, slots=True)
class MaterializeCall:
    """Decode record slots to float32 rows: k_out, v_out [n_kv_head, len(slots) * 128, D].

    ``rotated``: leave the rows in the rotated domain the records are in.
    """

    layer: LayerSpec
    buffers: LayerBuffers
    slots: Any
    k_out: Any
    v_out: Any
    rotated: bool
