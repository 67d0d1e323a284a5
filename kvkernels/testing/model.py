"""The list-of-rows model: what a cache must compute, in float64, with no kernel,
page or ring in sight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.cpu import reference
from kvkernels.cpu.reference_attend import attend
from kvkernels.op import LayerSpec
from kvkernels.records.layout import GROUP, Side

F64 = NDArray[np.float64]


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
        self.resident: set[int] = set()
        self._decoded: dict[tuple[int, bytes], tuple[F64, F64]] = {}

    @property
    def n(self) -> int:
        """Rows stored."""
        return len(self.k)

    def append(self, k: NDArray[Any], v: NDArray[Any]) -> None:
        """Rows [n, n_kv_head, D] of a committed step."""
        before = self.n // GROUP
        self.k += list(np.asarray(k, np.float32))
        self.v += list(np.asarray(v, np.float32))
        open_group = self.n // GROUP
        sinks = set(range(min(self.spec.sink_tokens // GROUP, open_group + 1)))
        newest = {open_group, open_group - 1} & (self.resident | set(range(before, open_group + 1)))
        self.resident = sinks | {g for g in newest if g >= 0}

    def rollback(self, n: int) -> None:
        """Drop the newest ``n`` rows."""
        keep = self.n - n
        del self.k[keep:], self.v[keep:]
        last = keep // GROUP if keep % GROUP else keep // GROUP - 1
        self.resident = {g for g in self.resident if g <= last}

    def copy(self) -> RowsModel:
        """An independent model with the same rows."""
        twin = RowsModel(self.spec)
        twin.k, twin.v = list(self.k), list(self.v)
        twin.resident, twin._decoded = set(self.resident), dict(self._decoded)
        return twin

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
        n_q, past = len(q), self.n
        exact_k, exact_v = self._exact()
        record_k, record_v = self._records(exact_k, exact_v)
        now_k, now_v = k.astype(np.float64), v.astype(np.float64)
        newest = min(GROUP, self.spec.window or GROUP)
        full = None
        if mask is not None:
            full = np.broadcast_to(mask, (self.spec.n_head, n_q, past + n_q))
        out = np.zeros((n_q, self.spec.n_head, self.spec.head_dim))
        for i in range(n_q):
            position = past + i
            fresh = np.arange(past) > position - newest
            recent = np.isin(np.arange(past) // GROUP, list(self.resident)) & fresh
            always = np.arange(past) // GROUP < self.spec.sink_tokens // GROUP
            always |= np.arange(past) >= past // GROUP * GROUP
            pick = (recent | always)[:, None, None]
            keys = np.concatenate([np.where(pick, exact_k, record_k), now_k])
            values = np.concatenate([np.where(pick, exact_v, record_v), now_v])
            out[i] = attend(
                q[i : i + 1].astype(np.float64),
                keys,
                values,
                scale=self.spec.scale,
                q_pos=np.array([position]),
                k_pos=np.arange(past + n_q),
                softcap=self.spec.softcap,
                alibi_max_bias=self.spec.alibi,
                window=self.spec.window,
                mask=None if full is None else full[:, i : i + 1],
                sink_logits=sink_logits,
            )[0]
        return out

    def _exact(self) -> tuple[F64, F64]:
        """Rows as the stage keeps them: rotated, fp16, seen in the original domain."""
        shape = (0, self.spec.n_kv_head, self.spec.head_dim)
        both = []
        for rows in (self.k, self.v):
            x = np.array(rows, np.float32).reshape(-1, *shape[1:])
            staged = reference.stage_rows(x).astype(np.float64)
            both.append(reference.rotate(staged, np.float64))
        return both[0], both[1]

    def _records(self, exact_k: F64, exact_v: F64) -> tuple[F64, F64]:
        """Rows as their records decode; rows of groups without a record stay NaN,
        so that a mix-up shows.
        """
        record_k, record_v = np.full_like(exact_k, np.nan), np.full_like(exact_v, np.nan)
        spec = self.spec
        assert spec.k_bits is not None
        assert spec.v_bits is not None
        for group in range(spec.sink_tokens // GROUP, self.n // GROUP):
            rows = slice(group * GROUP, (group + 1) * GROUP)
            k, v = np.array(self.k[rows]), np.array(self.v[rows])
            key = (group, k.tobytes() + v.tobytes())
            if key not in self._decoded:
                self._decoded[key] = (
                    _through_record(k, Side.K, spec.k_bits),
                    _through_record(v, Side.V, spec.v_bits),
                )
            record_k[rows], record_v[rows] = self._decoded[key]
        return record_k, record_v


def _through_record(rows: NDArray[Any], side: Side, bits: int) -> F64:
    """[128, n_kv_head, D] encoded and decoded head by head, in the original domain."""
    dim = rows.shape[2]
    heads = [
        reference.decode(reference.encode(rows[:, h], side, bits), side, bits, dim)
        for h in range(rows.shape[1])
    ]
    return reference.rotate(np.stack(heads, 1).astype(np.float64), np.float64)
