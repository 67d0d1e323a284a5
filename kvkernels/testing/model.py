"""The list-of-rows model: what a cache must compute, in float64, with no kernel or page in sight.

A sequence of a layer is a list of rows; for every query each visible row is scored once, from the
one place that the rules name: the query's own step, the ring of exact rows, or the body.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.cpu.reference_attend import alibi_slopes, visible
from kvkernels.op import LayerSpec
from kvkernels.request import Representation, ResolvedTail
from kvkernels.storage import EXACT_TYPES
from kvkernels.testing.model_rows import (
    F64,
    Bytes,
    ModelTail,
    Picks,
    PlainBody,
    RecordBody,
    Ring,
    Source,
    newest_visible,
)

_QUERIES = 32  # query rows at a time: bounds the float64 scores


def model_of(spec: LayerSpec, resolved: ResolvedTail | None = None) -> RowsModel:
    """The empty model of a layer whose tail came to ``resolved``. Full attention that is covered
    whole is a plain cache of the exact type (T9).
    """
    if resolved is None or resolved.representation in (Representation.NONE, Representation.STAGE):
        return RowsModel(spec)
    dtype = str(resolved.dtype)
    covered = resolved.representation is Representation.NATIVE_EXACT
    if covered and spec.window is None:
        k, v = (t if t in EXACT_TYPES else dtype for t in (spec.k, spec.v))
        plain = replace(spec, k=k, v=v, sink_tokens=0, tail=0, tail_dtype=None)
        return RowsModel(plain)
    return RowsModel(
        spec,
        ModelTail(
            rows=resolved.effective, rollback=resolved.rollback, dtype=dtype, bodyless=covered
        ),
    )


class RowsModel:
    """One sequence of one layer as plain lists of rows.

    KVarN: ``resident`` are the groups whose stage rows the cache still holds besides their record;
    the newest 128 rows of a query are taken from them (T3), the rest from the record. ``tail``: the
    newest N *visible* rows of a query are taken from the ring as far as it covers them (T6); a
    tail that needs no ring (KVarN's own 128 rows) is None.
    """

    def __init__(self, spec: LayerSpec, tail: ModelTail | None = None) -> None:
        self.spec, self.tail = spec, tail
        self._body = (RecordBody if spec.is_kvarn else PlainBody)(spec)
        self.ring = Ring(spec, tail) if tail else None

    @property
    def n(self) -> int:
        """Rows stored."""
        return len(self._body.k)

    @property
    def k(self) -> list[NDArray[Any]]:
        """K rows as they came, float32 [n_kv_head, D] each."""
        return self._body.k

    @property
    def v(self) -> list[NDArray[Any]]:
        """V rows as they came, float32 [n_kv_head, D_v] each."""
        return self._body.v

    @property
    def resident(self) -> set[int]:
        """KVarN groups whose stage rows are still there."""
        return self._records.resident

    @property
    def keeps_records(self) -> bool:
        """Whether there are records at all."""
        return self.spec.is_kvarn and not (self.tail and self.tail.bodyless)

    @property
    def broken(self) -> bool:
        """Without a body, and a row that the next query would see is gone: no step any more."""
        if not (self.ring and self.tail and self.tail.bodyless):
            return False
        return bool(self._visible(np.array([self.n]), self.ring.start).any())

    def append(self, k: NDArray[Any], v: NDArray[Any], q: NDArray[Any] | None = None) -> None:
        """Rows [n, n_kv_head, D] of a committed step; ``q`` [n, n_head, D] for the aware
        encoder."""
        k, v = np.array(k, np.float32), np.array(v, np.float32)
        self._body.append(k, v, None if q is None else np.array(q, np.float32))
        if self.ring:
            self.ring.append(k, v)

    def rollback(self, n: int) -> None:
        """Drop the newest ``n`` rows."""
        keep = self.n - n
        self._body.truncate(keep)
        if self.ring:
            self.ring.truncate(keep)

    def lose(self, rows: int, first: int | None = None) -> None:
        """A commit of ``rows`` rows failed while it wrote them into this ring, which a fork may
        share with the sequence that wrote, from its position ``first`` on (T11).
        """
        if self.ring:
            self.ring.lose(rows, first)

    def lowest(self) -> int:
        """Smallest length that a rollback must be able to reach, and for KVarN, full attention and
        a bodyless tail also the smallest that it can (C5). A windowed body of a standard type may
        have let go of rows; how many is the cache's business.
        """
        if self.ring and self.ring.tail.bodyless:
            return self.ring.lowest()
        return self._body.lowest()

    def copy(self) -> RowsModel:
        """An independent model with the same rows."""
        twin = RowsModel(self.spec, self.tail)
        twin._body = self._body.copy()
        twin.ring = self.ring.copy() if self.ring else None
        return twin

    def record_bytes(self, group: int) -> tuple[Bytes, Bytes]:
        """K and V records of a sealed group by the layer's encoder: uint8 [n_kv_head, bytes]."""
        return self._records.record_bytes(group)

    def attend(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        *,
        mask: Any = None,
        sink_logits: Any = None,
    ) -> F64:
        """float64 [n_q, n_head, D_v]: one softmax over the stored rows and the current ones
        (B1-B4).
        """
        spec, n_q, past = self.spec, len(q), self.n
        full = None
        if mask is not None:
            full = np.broadcast_to(mask, (spec.n_head, n_q, past + n_q))
        out = np.zeros((n_q, spec.n_head, spec.head_dim_v))
        for start in range(0, n_q, _QUERIES):
            rows = np.arange(start, min(start + _QUERIES, n_q))
            see = self._visible(past + rows, past + n_q)
            bias = None if full is None else full[:, rows]
            sources = self.sources(past + rows, k, v, see & _somewhere(bias))
            if self.ring and self.ring.tail.bodyless:
                see[:, : self.ring.start] = False  # those rows do not exist any more
            times = np.sum([source.pick & see for source in sources], axis=0)
            assert (times == see).all(), "every visible row is scored exactly once"
            for head in range(spec.n_head):
                out[rows, head] = self._one_head(
                    head, np.asarray(q[rows, head], np.float64), past + rows, see, sources,
                    None if bias is None else bias[head], sink_logits,
                )  # fmt: skip
        return out

    def sources(
        self, position: NDArray[np.int64], k: NDArray[Any], v: NDArray[Any], see: Picks
    ) -> list[Source]:
        """Where queries at ``position`` take every row from; ``k`` and ``v`` are the step's own
        rows, and ``see`` bool [n_q, n_kv] says what a query sees in at least one head. Picks are
        over all rows, those of the step included.
        """
        now = np.arange(see.shape[1]) >= self.n
        keys, values = (np.asarray(x, np.float64) for x in (k, v))
        current = Source(keys, values, np.broadcast_to(now, see.shape))
        found = [_widened(current, before=self.n)]
        left = np.ones((len(position), self.n), np.bool_)
        if self.ring:
            newest = newest_visible(see, self.ring.tail.rows)[:, : self.n]
            exact = self.ring.source(newest)
            found.append(_widened(exact, after=len(k)))
            left &= ~exact.pick
            if self.ring.tail.bodyless:
                return found
        for keys, values, pick in self._body.sources(position):
            found.append(_widened(Source(keys, values, pick & left), after=len(k)))
        return found

    @property
    def _records(self) -> RecordBody:
        assert isinstance(self._body, RecordBody)
        return self._body

    def _visible(self, position: NDArray[np.int64], n: int) -> Picks:
        spec = self.spec
        return np.array(
            visible(
                position,
                np.arange(n),
                causal=spec.causal,
                window=spec.window,
                window_kind=spec.window_kind,
            )
        )

    def _one_head(
        self, head: int, q: F64, position: Any, see: Picks, sources: list[Source], bias: Any,
        sink_logits: Any,
    ) -> F64:  # fmt: skip
        spec = self.spec
        h = head // spec.gqa
        score: F64 = np.zeros(see.shape)
        for keys, _, pick in sources:
            score += np.where(pick, spec.scale * (q @ keys[:, h].T), 0.0)
        if spec.softcap > 0:  # the cap first, then every bias (B1, F17)
            score = spec.softcap * np.tanh(score / spec.softcap)
        if spec.alibi > 0:
            distance = np.abs(position[:, None] - np.arange(score.shape[1]))
            score -= alibi_slopes(spec.n_head, spec.alibi)[head] * distance
        if bias is not None and bias.dtype == np.bool_:
            see = see & bias
        elif bias is not None:
            score = score + np.asarray(bias, np.float64)
        score = np.where(see, score, -np.inf)
        sink = -math.inf if sink_logits is None else float(sink_logits[head])
        top = np.maximum(score.max(1, initial=-np.inf), sink)
        top[np.isneginf(top)] = 0.0  # nothing to see: every weight is 0, and so is the row
        p = np.exp(score - top[:, None])
        total = p.sum(1) + np.exp(sink - top)
        weighted = sum((p * pick) @ values[:, h] for _, values, pick in sources)
        divided: F64 = np.divide(
            weighted, total[:, None], out=np.zeros_like(weighted), where=total[:, None] > 0
        )
        return divided


def _somewhere(bias: Any) -> Any:
    """What a mask [n_head, n_q, n_kv] shows in at least one head; all of it without a mask."""
    if bias is None:
        return np.bool_(True)
    return (bias if bias.dtype == np.bool_ else ~np.isneginf(bias)).any(0)


def _widened(source: Source, *, before: int = 0, after: int = 0) -> Source:
    """The source with rows of zeros that nobody picks around it, so that all have one length."""
    keys, values, pick = source
    room = ((before, after), (0, 0), (0, 0))
    missing = before + len(keys) + after - len(pick.T)
    return Source(np.pad(keys, room), np.pad(values, room), np.pad(pick, ((0, 0), (0, missing))))
