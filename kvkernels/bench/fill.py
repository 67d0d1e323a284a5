"""Long caches in little time: one batch of groups is encoded, the rest are copies of it.

Contents repeat every ``PERIOD`` tokens, sizes and addresses do not: each group has its own slot, so
a decode reads as many bytes from as many places as over a text without repetitions. For full
attention only: a window would free the slots that are copied from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.backend import Device
from kvkernels.bench import contents
from kvkernels.bench.contents import repeat, taken
from kvkernels.bench.workload import F32, F64, Rows, random_rows
from kvkernels.cache import Cache
from kvkernels.calls import CommitCall, GroupWrite
from kvkernels.dispatch import Policy
from kvkernels.op import GROUP, LayerSpec
from kvkernels.planner import Limits, plan
from kvkernels.step import Step
from kvkernels.storage import Body

_BATCH = 8  # groups that are really encoded
PERIOD = _BATCH * GROUP
_STEP = 512


class _Copying:
    """A device whose commits copy the record or tile of the same content when there is one. Rings
    are written for real.
    """

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
        tiles = call.buffers.storage.body is Body.TILES
        for write in call.writes:
            known = self._slots.get(write.group % _BATCH)
            # A record is sealed whole; a tile may still be open, and then it is no copy of another.
            if write.slot < 0 or (tiles and write.rows < GROUP):
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
        q, k, v = (taken(getattr(self.rows, name), self.past, n_q) for name in "qkv")
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
        q, k, v = (taken(getattr(self.rows, name), self.past, n_q) for name in "qkv")

        def call() -> F32:
            step = self._step(n_q)
            out: F32 = step.attend(0, q, k, v)
            step.discard()
            return out

        return call

    def last_rows(self, n: int) -> Rows:
        """Keys and values of the first ``n`` rows, and the query of the last of them alone."""
        q = taken(self.rows.q, n - 1, 1)
        return Rows(q, taken(self.rows.k, 0, n), taken(self.rows.v, 0, n))

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
        """The float64 reference over the same records or tiles and exact rows, [n_q, n_head, D]."""
        return self._attended(n_q, range(n_q), current=True)

    def expected_past(self, n_q: int, some: slice) -> F64:
        """The same for ``past_call``, for some of its rows."""
        return self._attended(n_q, range(n_q)[some], current=False)

    def _attended(self, n_q: int, some: range, *, current: bool) -> F64:
        spec, queries = self.cache.plan.layers[0].spec, taken(self.rows.q, self.past, n_q)
        found = []
        for i in some:
            seen = contents.heads(self.cache, self.rows, self.past, i, i + 1 if current else 0)
            found.append(attend_heads(spec, queries[i : i + 1], seen))
        return np.concatenate(found)


class _Recorder:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.last: tuple[Any, Any, Any] = (None, None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def run(self, entry: str, op: Any, call: Any) -> None:
        self.last = (entry, op, call)
        self._device.run(entry, op, call)


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


def pairs(keys: F32, values: F32) -> Iterator[tuple[F64, F64]]:
    """Keys and values [n_kv_head, n, D] as `attend_heads` takes them."""
    for k, v in zip(keys, values, strict=True):
        yield k.astype(np.float64), v.astype(np.float64)


def tokens(rows: NDArray[np.float32], n: int) -> F32:
    """The first ``n`` rows, head by head and contiguous: [n_kv_head, n, D]."""
    out = np.empty((rows.shape[1], n, rows.shape[2]), np.float32)
    for h in range(len(out)):
        repeat(rows[:, h], out[h])
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
        parts = [device.rows(x, taken(getattr(rows, x), start, n)) for x in "qkv"]
        step._rows[0] = (parts[0], parts[1], parts[2])
        step.commit()
    cache.device = device
    return Filled(cache, rows, past)
