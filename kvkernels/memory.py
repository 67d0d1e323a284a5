"""Bytes of a cache, with the field names of semantics M1:
predicted by the plan and reported by the cache.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from kvkernels.op import KVARN_BITS, LayerSpec
from kvkernels.quants import block_type
from kvkernels.quants.tiles import TileLayout
from kvkernels.records.layout import GROUP, HeadLayout, Side
from kvkernels.storage import Body, Pages, Storage

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HALF = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """All sizes in bytes. resident = what is allocated; peak = resident + transient (M2)."""

    kv_k_payload_bytes: int = 0
    kv_v_payload_bytes: int = 0
    kv_exact_history_bytes: int = 0
    kv_rollback_reserve_bytes: int = 0
    kv_staging_bytes: int = 0
    kv_padding_bytes: int = 0
    kv_metadata_bytes: int = 0
    kv_transient_bytes: int = 0

    @property
    def kv_resident_bytes(self) -> int:
        """Sum of the persistent fields."""
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "kv_transient_bytes")

    @property
    def kv_peak_bytes(self) -> int:
        """Resident plus transient."""
        return self.kv_resident_bytes + self.kv_transient_bytes

    def __add__(self, other: Memory) -> Memory:
        # Transients are one reusable workspace, so they do not add up: the largest counts.
        total = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        total["kv_transient_bytes"] = max(self.kv_transient_bytes, other.kv_transient_bytes)
        return Memory(**total)

    def to_json(self) -> dict[str, int]:
        """Every field of M1 by name."""
        return {
            **asdict(self),
            "kv_resident_bytes": self.kv_resident_bytes,
            "kv_peak_bytes": self.kv_peak_bytes,
        }


def ring_slots(storage: Storage) -> int:
    """Slots of K in a ring: whole vectors of 64 tokens."""
    return -(-storage.capacity // 64) * 64


def ring_tiles(k: NDArray[Any], dim: int, storage: Storage) -> list[tuple[int, NDArray[Any]]]:
    """K of rings, [n_kv_head, rings, D * slots], as (first slot, view [.., D, up to 128 slots]):
    like blocks and tiles, so that a kernel walks memory in order.
    """
    slots, found = ring_slots(storage), []
    for first in range(0, slots, GROUP):
        width = min(GROUP, slots - first)
        part = k[..., first * dim : (first + width) * dim]
        found.append((first, part.reshape(*k.shape[:-1], dim, width)))
    return found


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes in bytes of one layer's buffers, all KV heads: per slot, per exact block and side, per
    ring. ``ring_row``: K and V of one row.
    """

    k_slot: int
    v_slot: int
    kv_block: int
    q_block: int
    k_ring: int = 0
    v_ring: int = 0
    ring_row: int = 0

    @classmethod
    def of(cls, layer: LayerSpec, storage: Storage, *, keep_queries: bool) -> LayerSizes:
        """Layout arithmetic (codec.md section 5, ``quants/tiles.py``)."""
        heads, dims = layer.n_kv_head, (layer.head_dim, layer.head_dim_v)
        records = storage.body is Body.RECORDS
        slots = [0, 0]
        if storage.body is not Body.NONE:
            slots = [
                heads * _slot_bytes(side, name, dim, records)
                for side, name, dim in zip(Side, (storage.k, storage.v), dims, strict=True)
            ]
        block = GROUP * layer.head_dim * _HALF if records else 0
        widths = [0, 0]
        if storage.tail_rows:
            widths = [block_type(t).nbytes for t in storage.ring_types]
        per_row = [heads * dim * width for dim, width in zip(dims, widths, strict=True)]
        return cls(
            k_slot=slots[0],
            v_slot=slots[1],
            kv_block=heads * block,
            q_block=layer.n_head * block if keep_queries else 0,
            k_ring=per_row[0] * ring_slots(storage),
            v_ring=per_row[1] * storage.capacity,
            ring_row=sum(per_row),
        )

    def largest(self, pages: Pages) -> int:
        """Bytes of the largest single buffer for that many pages: devices limit that too."""
        blocks = pages.blocks * max(self.kv_block, self.q_block)
        rings = pages.rings * max(self.k_ring, self.v_ring)
        return max(pages.slots * max(self.k_slot, self.v_slot), blocks, rings)

    def memory(self, pages: Pages, storage: Storage) -> Memory:
        """Persistent bytes for that many pages."""
        rows = pages.rings * self.ring_row
        return Memory(
            kv_k_payload_bytes=pages.slots * self.k_slot,
            kv_v_payload_bytes=pages.slots * self.v_slot,
            kv_staging_bytes=pages.blocks * (2 * self.kv_block + self.q_block),
            kv_exact_history_bytes=rows * storage.tail_rows,
            kv_rollback_reserve_bytes=rows * storage.reserve if storage.tail_rows else 0,
            kv_padding_bytes=pages.rings * (self.k_ring + self.v_ring) - rows * storage.capacity,
        )


def _slot_bytes(side: Side, name: str, dim: int, records: bool) -> int:
    if records:
        return HeadLayout(side, KVARN_BITS[name], dim).nbytes
    return TileLayout(side, name, dim).nbytes
