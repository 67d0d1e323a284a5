"""Bytes of a cache, with the field names of semantics M1:
predicted by the plan and reported by the cache.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from kvkernels.op import LayerSpec
from kvkernels.records.layout import GROUP, HeadLayout, Side

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


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes in bytes of one layer's buffers: per record slot and per exact block, all KV heads."""

    k_slot: int
    v_slot: int
    kv_block: int
    q_block: int

    @classmethod
    def of(cls, layer: LayerSpec, *, keep_queries: bool) -> LayerSizes:
        """Layout arithmetic for a KVarN layer (codec.md section 5)."""
        assert layer.k_bits is not None
        assert layer.v_bits is not None
        rows = GROUP * layer.head_dim * _HALF
        return cls(
            k_slot=layer.n_kv_head * HeadLayout(Side.K, layer.k_bits, layer.head_dim).nbytes,
            v_slot=layer.n_kv_head * HeadLayout(Side.V, layer.v_bits, layer.head_dim).nbytes,
            kv_block=layer.n_kv_head * rows,
            q_block=layer.n_head * rows if keep_queries else 0,
        )

    def memory(self, slots: int, blocks: int) -> Memory:
        """Persistent bytes for that many record slots and exact blocks."""
        return Memory(
            kv_k_payload_bytes=slots * self.k_slot,
            kv_v_payload_bytes=slots * self.v_slot,
            kv_staging_bytes=blocks * (2 * self.kv_block + self.q_block),
        )
