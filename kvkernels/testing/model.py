"""The list-of-rows model: what a cache must compute, in float64, with no kernel,
page or ring in sight.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.cpu import reference, reference_aware
from kvkernels.cpu.reference_attend import alibi_slopes, visible
from kvkernels.op import LayerSpec
from kvkernels.records.layout import GROUP, Side

F64 = NDArray[np.float64]
Bytes = NDArray[np.uint8]
_QUERIES = 32  # query rows at a time: bounds the float64 scores


class RowsModel:
    """One sequence of one layer as plain lists of rows, un-rotated, float32 [n_kv_head, D] each.

    ``resident`` are the groups whose exact rows the cache still holds besides their record; the
    newest 128 visible rows of a query are taken from them (semantics T3, T6), the rest from the
    record.
    """

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.k: list[NDArray[Any]] = []
        self.v: list[NDArray[Any]] = []
        self.q: list[NDArray[Any]] = []
        self.resident: set[int] = set()
        self._exact: list[tuple[F64, F64]] = []
        self._records: dict[int, tuple[F64, F64]] = {}

    @property
    def n(self) -> int:
        """Rows stored."""
        return len(self.k)

    def append(self, k: NDArray[Any], v: NDArray[Any], q: NDArray[Any] | None = None) -> None:
        """Rows [n, n_kv_head, D] of a committed step; ``q`` [n, n_head, D] for the aware
        encoder."""
        before = self.n // GROUP
        k, v = np.array(k, np.float32), np.array(v, np.float32)
        self.k += list(k)
        self.v += list(v)
        self.q += [] if q is None else list(np.array(q, np.float32))
        self._exact += zip(_through_stage(k), _through_stage(v), strict=True)
        open_group = self.n // GROUP
        sinks = set(range(min(self.spec.sink_tokens // GROUP, open_group + 1)))
        newest = {open_group, open_group - 1} & (self.resident | set(range(before, open_group + 1)))
        self.resident = sinks | {g for g in newest if g >= 0}

    def rollback(self, n: int) -> None:
        """Drop the newest ``n`` rows."""
        keep = self.n - n
        del self.k[keep:], self.v[keep:], self.q[keep:], self._exact[keep:]
        last = keep // GROUP if keep % GROUP else keep // GROUP - 1
        self.resident = {g for g in self.resident if g <= last}
        self._records = {g: r for g, r in self._records.items() if g < keep // GROUP}

    def copy(self) -> RowsModel:
        """An independent model with the same rows."""
        twin = RowsModel(self.spec)
        twin.k, twin.v, twin.q = list(self.k), list(self.v), list(self.q)
        twin._exact = list(self._exact)
        twin.resident, twin._records = set(self.resident), dict(self._records)
        return twin

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

    def attend(
        self,
        q: NDArray[Any],
        k: NDArray[Any],
        v: NDArray[Any],
        *,
        mask: Any = None,
        sink_logits: Any = None,
    ) -> F64:
        """float64 [n_q, n_head, D]: one softmax over the stored rows and the current ones
        (B1-B4).
        """
        spec, n_q, past = self.spec, len(q), self.n
        shape = (past, spec.n_kv_head, spec.head_dim)
        exact = [np.array([r[i] for r in self._exact]).reshape(shape) for i in (0, 1)]
        record, sealed = self._decoded(exact)
        now = [np.asarray(x, np.float64) for x in (k, v)]
        keys = np.concatenate([exact[0], now[0]]), np.concatenate([record[0], now[0]])
        values = np.concatenate([exact[1], now[1]]), np.concatenate([record[1], now[1]])
        full = None
        if mask is not None:
            full = np.broadcast_to(mask, (spec.n_head, n_q, past + n_q))
        out = np.zeros((n_q, spec.n_head, spec.head_dim))
        for start in range(0, n_q, _QUERIES):
            rows = np.arange(start, min(start + _QUERIES, n_q))
            see = visible(past + rows, np.arange(past + n_q), window=spec.window)
            pick = self._from_exact(past + rows, past + n_q)
            assert not (see & ~pick & ~np.append(sealed, np.ones(n_q, bool))).any()
            for head in range(spec.n_head):
                bias = None if full is None else full[head, rows]
                out[rows, head] = self._one_head(
                    head, np.asarray(q[rows, head], np.float64), past + rows, see, pick,
                    keys, values, bias, sink_logits,
                )  # fmt: skip
        return out

    def _one_head(
        self, head: int, q: F64, position: Any, see: Any, pick: Any,
        keys: tuple[F64, F64], values: tuple[F64, F64], bias: Any, sink_logits: Any,
    ) -> F64:  # fmt: skip
        spec = self.spec
        h = head // spec.gqa
        score = spec.scale * np.where(pick, q @ keys[0][:, h].T, q @ keys[1][:, h].T)
        if spec.softcap > 0:  # the cap first, then every bias (B1, F17)
            score = spec.softcap * np.tanh(score / spec.softcap)
        if spec.alibi > 0:
            distance = position[:, None] - np.arange(score.shape[1])
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
        weighted = (p * pick) @ values[0][:, h] + (p * ~pick) @ values[1][:, h]
        divided: F64 = np.divide(
            weighted, total[:, None], out=np.zeros_like(weighted), where=total[:, None] > 0
        )
        return divided

    def _from_exact(self, position: Any, n: int) -> Any:
        """bool [n_q, n]: keys that a query takes from exact rows: sinks, the open group, the
        step's own rows, and of the other resident groups the newest 128 rows.
        """
        row, newest = np.arange(n), min(GROUP, self.spec.window or GROUP)
        recent = np.isin(row // GROUP, list(self.resident)) & (row > position[:, None] - newest)
        always = (row // GROUP < self.spec.sink_tokens // GROUP) | (row >= self.n // GROUP * GROUP)
        return recent | always

    def _decoded(self, exact: list[F64]) -> tuple[tuple[F64, F64], NDArray[np.bool_]]:
        """Rows as their records decode (0 where there is none), and which rows have a record."""
        out = np.zeros_like(exact[0]), np.zeros_like(exact[1])
        sealed = np.zeros(self.n, np.bool_)
        spec = self.spec
        assert spec.k_bits is not None
        assert spec.v_bits is not None
        for group in range(spec.sink_tokens // GROUP, self.n // GROUP):
            if group not in self._records:
                k, v = self.record_bytes(group)
                self._records[group] = (
                    _from_records(k, Side.K, spec.k_bits, spec.head_dim),
                    _from_records(v, Side.V, spec.v_bits, spec.head_dim),
                )
            rows = slice(group * GROUP, (group + 1) * GROUP)
            out[0][rows], out[1][rows] = self._records[group]
            sealed[rows] = True
        return out, sealed


def _through_stage(x: NDArray[Any]) -> F64:
    """Rows as the stage keeps them (rotated, fp16), seen in the original domain."""
    return reference.rotate(reference.stage_rows(x).astype(np.float64), np.float64)


def _from_records(records: Bytes, side: Side, bits: int, dim: int) -> F64:
    """Records of all heads as rows [128, n_kv_head, D] of the original domain."""
    heads = [reference.decode(r, side, bits, dim).astype(np.float64) for r in records]
    return reference.rotate(np.stack(heads, 1), np.float64)
