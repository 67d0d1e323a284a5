"""Long caches in little time: one batch of groups is encoded, its records are copied to the rest.

Contents repeat every ``PERIOD`` tokens, sizes and addresses do not: each group has its own record
slot, so a decode reads as many bytes from as many places as over a text without repetitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.backend import Device
from kvkernels.bench.workload import F32, F64, Rows, random_rows
from kvkernels.cache import Cache
from kvkernels.calls import CommitCall, GroupWrite
from kvkernels.cpu import reference
from kvkernels.dispatch import Policy
from kvkernels.op import GROUP, LayerSpec
from kvkernels.planner import Limits, plan
from kvkernels.records.layout import HeadLayout, Side
from kvkernels.step import Step

_BATCH = 8  # groups that are really encoded
PERIOD = _BATCH * GROUP
_STEP = 512


class _Copying:
    """A device whose commits copy the record of the same content when there is one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slots: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def run(self, entry: str, op: Any, call: Any) -> None:
        """Run, or copy."""
        if not isinstance(call, CommitCall):
            self._device.run(entry, op, call)
            return
        real: list[GroupWrite] = []
        copies: list[tuple[int, int]] = []
        for write in call.writes:
            known = self._slots.get(write.group % _BATCH)
            if write.slot < 0:
                real.append(write)
            elif known is None:
                self._slots[write.group % _BATCH] = write.slot
                real.append(write)
            else:
                copies.append((known, write.slot))
                if write.block >= 0:
                    real.append(replace(write, slot=-1))
        self._device.run(entry, op, replace(call, writes=tuple(real)))
        for pool in (call.buffers.k_records, call.buffers.v_records):
            records = pool.reshape(call.layer.n_kv_head, call.buffers.slots, -1)
            for source, target in copies:
                records[:, target] = records[:, source]


@dataclass(frozen=True, slots=True)
class Filled:
    """A cache of ``past`` tokens of repeating ``rows`` (one period), and the next rows."""

    cache: Cache
    rows: Rows
    past: int

    def once(self, n_q: int = 1) -> Callable[[], F32]:
        """Attention of the next ``n_q`` rows in a step that is already open: what every layer but
        the first costs, since the step's own work is done once for all layers. Nothing is stored.
        """
        q, k, v = (_taken(getattr(self.rows, name), self.past, n_q) for name in "qkv")
        step = self._step(n_q)

        def call() -> F32:
            step._rows.clear()  # the layer stands in for the next one
            out: F32 = step.attend(0, q, k, v)
            return out

        return call

    def _step(self, n_q: int) -> Step:
        if self.cache._open is not None:
            self.cache._open.discard()
        return self.cache.step({0: n_q})

    def whole_step(self, n_q: int = 1) -> Callable[[], F32]:
        """The same with a step of its own each time, as for a model of one layer."""
        q, k, v = (_taken(getattr(self.rows, name), self.past, n_q) for name in "qkv")

        def call() -> F32:
            step = self._step(n_q)
            out: F32 = step.attend(0, q, k, v)
            step.discard()
            return out

        return call

    def last_rows(self, n: int) -> Rows:
        """Keys and values of the first ``n`` rows, and the query of the last of them alone."""
        q = _taken(self.rows.q, n - 1, 1)
        return Rows(q, _taken(self.rows.k, 0, n), _taken(self.rows.v, 0, n))

    def past_call(self, n_q: int) -> Callable[[], F32]:
        """Attention of ``n_q`` rows over the past alone, all of it visible to every row."""
        device, entry, op, call = self._launch(n_q)
        call = replace(call, k=None, v=None, out=np.empty_like(call.out))

        def again() -> F32:
            device.run(entry, op, call)
            out: F32 = call.out
            return out

        return again

    def launch_call(self) -> Callable[[], F32]:
        """The kernel launch of ``once`` alone, without step, checks and operation."""
        device, entry, op, call = self._launch(1)

        def again() -> F32:
            device.run(entry, op, call)
            out: F32 = call.out
            return out

        return again

    def _launch(self, n_q: int) -> tuple[Device, str, Any, Any]:
        device, recorder = self.cache.device, _Recorder(self.cache.device)
        self.cache.device = recorder
        self.whole_step(n_q)()
        self.cache.device = device
        return device, *recorder.last

    def expected(self, n_q: int = 1) -> F64:
        """The float64 reference over the same records and exact rows, [n_q, n_head, D]."""
        queries = _taken(self.rows.q, self.past, n_q)
        rows = range(n_q)
        return np.concatenate(
            [attend_heads(self._spec, queries[i : i + 1], self._heads(i, i + 1)) for i in rows]
        )

    def expected_past(self, n_q: int, some: slice) -> F64:
        """The same for ``past_call``, for some of its rows."""
        queries = _taken(self.rows.q, self.past, n_q)
        rows = range(n_q)[some]
        return np.concatenate(
            [attend_heads(self._spec, queries[i : i + 1], self._heads(i, 0)) for i in rows]
        )

    @property
    def _spec(self) -> LayerSpec:
        return self.cache.plan.layers[0].spec

    def _heads(self, ahead: int, new: int) -> Iterator[tuple[F64, F64]]:
        """What the row ``ahead`` of the next one sees of every KV head: the past and the first
        ``new`` rows, keys and values [n, D].
        """
        buffers = self.cache.buffers[0]
        sides = [
            (Side.K, self._spec.k_bits, self.rows.k, buffers.k_records),
            (Side.V, self._spec.v_bits, self.rows.v, buffers.v_records),
        ]
        for h in range(self._spec.n_kv_head):
            keys, values = (self._head(*side, h, ahead, new) for side in sides)
            yield keys, values

    def _head(
        self, side: Side, bits: int | None, exact: F32, pool: Any, h: int, ahead: int, new: int
    ) -> F64:
        """Every record decoded by the reference, else the row as the stage rounds it."""
        assert bits is not None
        dim, pages = self._spec.head_dim, self.cache.state[0].pages[self.cache.class_of[0]]
        nbytes = HeadLayout(side, bits, dim).nbytes
        records = np.asarray(pool).reshape(self._spec.n_kv_head, -1, nbytes)[h]
        staged = reference.stage_rows(exact[:, h : h + 1]).astype(np.float64)
        out = np.empty((self.past + new, dim))
        _repeat(reference.rotate(staged, np.float64)[:, 0], out)
        known: dict[int, F64] = {}
        for group, slot in enumerate(pages.table):
            stop = (group + 1) * GROUP
            if group in pages.blocks:  # a row sees the 128 up to itself exactly
                stop = min(stop, self.past + ahead - GROUP + 1)
            if slot < 0 or stop <= group * GROUP:  # sinks have no record
                continue
            content = group % _BATCH
            if content not in known:
                tile = reference.decode(records[slot], side, bits, dim)
                known[content] = reference.rotate(tile, np.float64)
            out[group * GROUP : stop] = known[content][: stop - group * GROUP]
        if new:
            out[self.past :] = _taken(exact[:, h], self.past, new)
        return out


class _Recorder:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.last: tuple[Any, Any, Any] = (None, None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def run(self, entry: str, op: Any, call: Any) -> None:
        self.last = (entry, op, call)
        self._device.run(entry, op, call)


def _taken(rows: NDArray[Any], start: int, n: int) -> NDArray[Any]:
    """Rows ``start .. start + n`` of the endless repetition of one period."""
    found: NDArray[Any] = np.take(rows, np.arange(start, start + n) % PERIOD, axis=0)
    return found


def _repeat(source: NDArray[Any], out: NDArray[Any]) -> None:
    for start in range(0, len(out), PERIOD):
        part = out[start : start + PERIOD]
        part[:] = source[: len(part)]


def attend_heads(spec: LayerSpec, q: F32, heads: Iterable[tuple[F64, F64]]) -> F64:
    """float64 attention of q [rows, n_head, D] over keys and values [n, D] of one KV head after the
    other, all of them visible.
    """
    grouped = q.astype(np.float64).reshape(len(q), spec.n_kv_head, spec.gqa, spec.head_dim)
    out = np.empty_like(grouped)
    for h, (k, v) in enumerate(heads):
        scores = grouped[:, h] @ k.T * spec.scale
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, h] = (p / p.sum(-1, keepdims=True)) @ v
    return out.reshape(q.shape)


def tokens(rows: NDArray[np.float32], n: int) -> F32:
    """The first ``n`` rows, head by head and contiguous: [n_kv_head, n, D]."""
    out = np.empty((rows.shape[1], n, rows.shape[2]), np.float32)
    for h in range(len(out)):
        _repeat(rows[:, h], out[h])
    return out


def period(spec: LayerSpec, seed: int = 7) -> Rows:
    """One period of rows."""
    return random_rows(spec, PERIOD, seed)


def repeated(
    spec: LayerSpec,
    device: Device,
    rows: Rows,
    past: int,
    *,
    activations: str = "auto",
    room: int = GROUP,
    policy: Policy | None = None,
) -> Filled:
    """A cache of one layer with ``past`` tokens, filled by copying."""
    limits = Limits(n_ctx=past + room, n_ubatch=max(_STEP, room), activations=activations)
    cache: Cache = plan([spec], device, limits, policy).allocate()
    copying: Any = _Copying(device)
    cache.device = copying
    for start in range(0, past, _STEP):
        n = min(_STEP, past - start)
        step = cache.step({0: n})
        parts = [device.rows(x, _taken(getattr(rows, x), start, n)) for x in "qkv"]
        step._rows[0] = (parts[0], parts[1], parts[2])
        step.commit()
    cache.device = device
    return Filled(cache, rows, past)
