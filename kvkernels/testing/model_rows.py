"""Where the list-of-rows model takes a committed row from: KVarN's records and stage, a body of a
standard type, and the ring of exact rows. Float64, un-rotated, [n, n_kv_head, D] throughout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkernels import quants
from kvkernels.cpu import reference, reference_aware
from kvkernels.op import LayerSpec
from kvkernels.records.layout import GROUP, Side
from kvkernels.storage import EXACT_TYPES

F64 = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Picks = NDArray[np.bool_]
Pair = tuple[F64, F64]


class Source(NamedTuple):
    """Rows of one origin, as many as there are committed, and which of them each query takes from
    it: ``pick`` bool [n_q, n].
    """

    keys: F64
    values: F64
    pick: Picks


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTail:
    """A tail that has a ring: ``rows`` newest visible rows per query (N) of ``dtype``, ``rollback``
    rows behind them (R). ``bodyless``: a window that the ring covers, and nothing else is stored.
    """

    rows: int
    rollback: int = 1
    dtype: str = "f16"
    bodyless: bool = False

    @property
    def capacity(self) -> int:
        """Rows of the ring: N + R (T8)."""
        return self.rows + self.rollback


class PlainBody:
    """A standard type: every row is what its own bytes decode to, from the step that brings it on.

    A row that a window has passed stays here for ever: whatever length a rollback may reach, the
    answer there is this.
    """

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.k: list[NDArray[Any]] = []
        self.v: list[NDArray[Any]] = []
        self.q: list[NDArray[Any]] = []
        self._stored: list[Pair] = []

    def append(self, k: NDArray[Any], v: NDArray[Any], q: NDArray[Any] | None) -> None:
        """Float32 rows of a committed step; ``q`` for the aware encoder."""
        self.k += list(k)
        self.v += list(v)
        self.q += [] if q is None else list(q)
        self._stored += self._store(k, v)

    def truncate(self, keep: int) -> None:
        """Keep the oldest ``keep`` rows."""
        del self.k[keep:], self.v[keep:], self.q[keep:], self._stored[keep:]

    def copy(self) -> PlainBody:
        """An independent body with the same rows."""
        twin = type(self)(self.spec)
        twin.k, twin.v, twin.q = list(self.k), list(self.v), list(self.q)
        twin._stored = list(self._stored)
        return twin

    def lowest(self) -> int:
        """Smallest length that a rollback can reach."""
        return 0

    def sources(self, position: NDArray[np.int64]) -> list[Source]:
        """What queries at ``position`` read of the committed rows; picks are a partition."""
        keys, values = self._all()
        return [Source(keys, values, np.ones((len(position), len(self.k)), np.bool_))]

    def _store(self, k: NDArray[Any], v: NDArray[Any]) -> Iterable[Pair]:
        return zip(through(k, self.spec.k), through(v, self.spec.v), strict=True)

    def _all(self) -> Pair:
        return stacked(self._stored, self.spec)


class RecordBody(PlainBody):
    """KVarN: a record per sealed group, rows as the stage keeps them, and which groups' stage rows
    the cache still holds (``resident``: sinks, the open group, the one before).
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.resident: set[int] = set()
        self._records: dict[int, Pair] = {}

    def append(self, k: NDArray[Any], v: NDArray[Any], q: NDArray[Any] | None) -> None:
        """As before, and group by group the stage moves on."""
        before = len(self.k) // GROUP
        super().append(k, v, q)
        open_group = len(self.k) // GROUP
        sinks = set(range(min(self.spec.sink_tokens // GROUP, open_group + 1)))
        newest = {open_group, open_group - 1} & (self.resident | set(range(before, open_group + 1)))
        self.resident = sinks | {g for g in newest if g >= 0}

    def truncate(self, keep: int) -> None:
        """A group that loses rows loses its record."""
        super().truncate(keep)
        last = keep // GROUP if keep % GROUP else keep // GROUP - 1
        self.resident = {g for g in self.resident if g <= last}
        self._records = {g: r for g, r in self._records.items() if g < keep // GROUP}

    def copy(self) -> RecordBody:
        """An independent body with the same rows."""
        twin = super().copy()
        assert isinstance(twin, RecordBody)
        twin.resident, twin._records = set(self.resident), dict(self._records)
        return twin

    def lowest(self) -> int:
        """Back through groups whose stage rows are still there (C3, C5)."""
        group = len(self.k) // GROUP
        while group > 0 and group - 1 in self.resident:
            group -= 1
        return group * GROUP

    def sources(self, position: NDArray[np.int64]) -> list[Source]:
        """The stage serves sinks, the open group, and of the other resident groups the newest 128
        rows of a query; records serve the rest.
        """
        n = len(self.k)
        staged, (keys, values, sealed) = self._all(), self._decoded()
        row, newest = np.arange(n), min(GROUP, self.spec.window or GROUP)
        recent = np.isin(row // GROUP, list(self.resident)) & (row > position[:, None] - newest)
        pick = recent | ~sealed
        return [Source(*staged, pick), Source(keys, values, ~pick)]

    def record_bytes(self, group: int) -> tuple[Bytes, Bytes]:
        """K and V records of a sealed group by the layer's encoder, from the reference: uint8
        [n_kv_head, bytes].
        """
        rows = slice(group * GROUP, (group + 1) * GROUP)
        spec = self.spec
        assert spec.k_bits is not None
        assert spec.v_bits is not None
        k, v = np.array(self.k[rows]), np.array(self.v[rows])
        keys, values = k.swapaxes(0, 1), v.swapaxes(0, 1)
        if spec.encoder == "published":
            return (
                np.stack([reference.encode(x, Side.K, spec.k_bits) for x in keys]),
                np.stack([reference.encode(x, Side.V, spec.v_bits) for x in values]),
            )
        queries = np.array(self.q[rows]).swapaxes(0, 1).reshape(spec.n_kv_head, spec.gqa, GROUP, -1)
        return (
            np.stack(
                [
                    reference_aware.encode(x, Side.K, spec.k_bits, q=q, may_refit=group > 0)
                    for x, q in zip(keys, queries, strict=True)
                ]
            ),
            np.stack(
                [
                    reference_aware.encode(x, Side.V, spec.v_bits, q=q, keys=own, scale=spec.scale)
                    for x, own, q in zip(values, keys, queries, strict=True)
                ]
            ),
        )

    def _store(self, k: NDArray[Any], v: NDArray[Any]) -> Iterable[Pair]:
        return zip(_through_stage(k), _through_stage(v), strict=True)

    def _decoded(self) -> tuple[F64, F64, Picks]:
        """Rows as their records decode (0 where there is none), and which rows have a record."""
        spec, n = self.spec, len(self.k)
        keys, values = (np.zeros((n, spec.n_kv_head, spec.head_dim)) for _ in "kv")
        sealed = np.zeros(n, np.bool_)
        assert spec.k_bits is not None
        assert spec.v_bits is not None
        for group in range(spec.sink_tokens // GROUP, n // GROUP):
            if group not in self._records:
                k, v = self.record_bytes(group)
                self._records[group] = (
                    _from_records(k, Side.K, spec.k_bits, spec.head_dim),
                    _from_records(v, Side.V, spec.v_bits, spec.head_dim),
                )
            rows = slice(group * GROUP, (group + 1) * GROUP)
            keys[rows], values[rows] = self._records[group]
            sealed[rows] = True
        return keys, values, sealed


class Ring:
    """The newest rows, exact (T7 to T10): those of [``start``, n), in the tail's dtype, or in the
    side's own type when that is exact already.

    Row j lies in slot j % (N + R), so a row comes back to no slot that a newer one has taken:
    ``start`` never falls on a rollback, only the length does.
    """

    def __init__(self, spec: LayerSpec, tail: ModelTail) -> None:
        self.spec, self.tail = spec, tail
        self.n = self.start = 0
        self.top = 0  # longest that the sequence has been
        self._rows: list[Pair] = []

    def append(self, k: NDArray[Any], v: NDArray[Any]) -> None:
        """Float32 rows of a committed step."""
        k_type, v_type = (
            t if t in EXACT_TYPES else self.tail.dtype for t in (self.spec.k, self.spec.v)
        )
        self._rows += zip(through(k, k_type), through(v, v_type), strict=True)
        self.n += len(k)
        self.start = max(self.start, self.n - self.tail.capacity)
        self.top = max(self.top, self.n)

    def truncate(self, keep: int) -> None:
        """Rows that are taken back leave; those that were overwritten do not come back."""
        del self._rows[keep:]
        self.n = keep
        self.start = min(self.start, keep)
        self.top = self.top if keep else 0

    def lose(self, rows: int, first: int | None = None) -> None:
        """A commit of ``rows`` rows from position ``first`` (this sequence's length) failed while
        it wrote them into this ring: what lay in their slots is gone.
        """
        first = self.n if first is None else first
        lost = first + rows - self.tail.capacity
        self.start = self.n if first < self.n else max(self.start, min(self.n, lost))

    def copy(self) -> Ring:
        """An independent ring with the same rows."""
        twin = Ring(self.spec, self.tail)
        twin.n, twin.start, twin.top = self.n, self.start, self.top
        twin._rows = list(self._rows)
        return twin

    def lowest(self) -> int:
        """Smallest length that a rollback can reach without a body: R rows below the longest, and
        no further than to where the next query sees nothing of what has been overwritten.
        """
        whole, window = self.start, self.spec.window
        if whole and window and self.spec.window_kind == "chunked":
            whole += -whole % window
        elif whole and window:
            whole += window // 2 if self.spec.window_kind == "symmetric" else window - 1
        return min(self.n, max(0, self.top - self.tail.rollback, whole))

    def exact(self) -> int:
        """Of the newest N rows, how many are here."""
        return min(self.tail.rows, self.n - self.start)

    def source(self, newest: Picks) -> Source:
        """The rows here that are among the ``newest`` [n_q, n] of a query; without a body all."""
        here = np.arange(self.n) >= self.start
        pick = np.broadcast_to(here, newest.shape) if self.tail.bodyless else newest & here
        return Source(*stacked(self._rows, self.spec), pick)


def newest_visible(see: Picks, n: int) -> Picks:
    """Of the rows that a query sees (bool [n_q, n_kv]) the newest ``n``, as bool [n_q, n_kv]."""
    newer = np.cumsum(see[:, ::-1], axis=1)[:, ::-1]
    return see & (newer <= n)


def stacked(rows: list[Pair], spec: LayerSpec) -> Pair:
    """Rows as two arrays, with their shape even when there is none."""
    dims = spec.head_dim, spec.head_dim_v
    keys, values = (
        np.array([row[i] for row in rows], np.float64).reshape(len(rows), spec.n_kv_head, dims[i])
        for i in (0, 1)
    )
    return keys, values


def through(x: NDArray[Any], kind: str) -> Iterator[F64]:
    """Float32 rows [n, n_kv_head, D] as a standard type keeps them."""
    return iter(quants.decode(quants.encode(x, kind), kind, x.shape[-1]).astype(np.float64))


def _through_stage(x: NDArray[Any]) -> F64:
    """Rows as the stage keeps them (rotated, fp16), seen in the original domain."""
    return reference.rotate(reference.stage_rows(x).astype(np.float64), np.float64)


def _from_records(records: Bytes, side: Side, bits: int, dim: int) -> F64:
    """Records of all heads as rows [128, n_kv_head, D] of the original domain."""
    heads = [reference.decode(r, side, bits, dim).astype(np.float64) for r in records]
    return reference.rotate(np.stack(heads, 1), np.float64)
