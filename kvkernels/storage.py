"""What a planned layer really keeps: its body and its ring. Plain values, decided by the plan."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag, StrEnum
from typing import NamedTuple

from kvkernels.op import LayerSpec

#: standard types whose rows are as exact as those of a tail
EXACT_TYPES = ("f32", "f16", "bf16")


class Body(StrEnum):
    """``records``: KVarN groups with a stage; ``tiles``: rows of a standard type; ``none``: the
    ring is all there is (T9).
    """

    RECORDS = "records"
    TILES = "tiles"
    NONE = "none"


class Stored(IntFlag):
    """In which forms fp16 must hold a row that is attended; NO: it need only be finite."""

    NO = 0
    ROTATED = 1
    PLAIN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """``k`` and ``v`` are the types really stored: those of the layer, or the exact type of a body
    that a tail covers. ``tail_rows`` N newest rows per query come from a ring of ``tail_rows +
    reserve`` rows of ``tail_dtype``; 0: no ring.
    """

    body: Body
    k: str
    v: str
    tail_rows: int = 0
    reserve: int = 0
    tail_dtype: str = "none"

    @property
    def capacity(self) -> int:
        """Rows of one ring."""
        return self.tail_rows + self.reserve if self.tail_rows else 0

    @property
    def ring_types(self) -> tuple[str, str]:
        """Types of the rows in a ring, K and V: a side that is exact already keeps its type."""
        k, v = (t if t in EXACT_TYPES else self.tail_dtype for t in (self.k, self.v))
        return k, v

    @property
    def stored(self) -> tuple[Stored, Stored]:
        """In which forms fp16 must hold a row of K and of V."""
        if self.body is Body.RECORDS:
            forms = [Stored.ROTATED, Stored.ROTATED]
        else:  # scales and minima of blocks are fp16 too
            wide = ("f32", "bf16")
            forms = [Stored.NO if t in wide else Stored.PLAIN for t in (self.k, self.v)]
        if self.tail_rows:
            halves = [t == "f16" for t in self.ring_types]
            forms = [f | Stored.PLAIN if h else f for f, h in zip(forms, halves, strict=True)]
        return forms[0], forms[1]

    @classmethod
    def plain(cls, spec: LayerSpec) -> Storage:
        """The layer as it asks, without a ring."""
        body = Body.RECORDS if spec.is_kvarn else Body.TILES
        return cls(body=body, k=spec.k, v=spec.v)


class Steps(NamedTuple):
    """The largest steps of a plan, in rows: what sizes transient memory."""

    n_ctx: int
    n_ubatch: int
    n_seq: int
    verify: int


class Pages(NamedTuple):
    """Physical pages of a class: slots of records or tiles, exact blocks, rings."""

    slots: int
    blocks: int
    rings: int
