"""Long caches in little time: one batch of groups is encoded, its records are copied to the rest.

Contents repeat every ``PERIOD`` tokens, sizes and addresses do not: each group has its own record
slot, so a decode reads as many bytes from as many places as over a text without repetitions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.backend import Device
from kvkernels.bench.workload import F32, F64, Rows, attend64, random_rows
from kvkernels.cache import Cache
from kvkernels.calls import CommitCall, GroupWrite
from kvkernels.cpu import reference
from kvkernels.dispatch import Policy
from kvkernels.op import GROUP, LayerSpec
from kvkernels.planner import Limits, plan
from kvkernels.records.layout import HeadLayout, Side

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
        """Attention of the next ``n_q`` rows as an engine would call it; nothing is stored."""
        q, k, v = (_taken(getattr(self.rows, name), self.past, n_q) for name in "qkv")

        def call() -> F32:
            step = self.cache.step({0: n_q})
            out: F32 = step.attend(0, q, k, v)
            step.discard()
            return out

        return call

    def past_call(self, n_q: int) -> Callable[[], F32]:
        """Attention of ``n_q`` rows over the past alone, all of it visible to every row."""
        device, recorder = self.cache.device, _Recorder(self.cache.device)
        self.cache.device = recorder
        self.once(n_q)()
        self.cache.device = device
        entry, op, call = recorder.last
        call = replace(call, k=None, v=None, out=np.empty_like(call.out))

        def again() -> F32:
            device.run(entry, op, call)
            out: F32 = call.out
            return out

        return again

    def expected(self, n_q: int = 1) -> F64:
        """The float64 reference over the same records and exact rows, [n_q, n_head, D]."""
        keys, values = self.seen()
        out = []
        for i in range(n_q):
            new = [_taken(getattr(self.rows, x), self.past, i + 1).astype(float) for x in "kv"]
            q = _taken(self.rows.q, self.past + i, 1)[0]
            both = [np.concatenate(pair) for pair in ((keys, new[0]), (values, new[1]))]
            out.append(attend64(self.cache.plan.layers[0].spec, q, *both))
        return np.stack(out)

    def expected_past(self, n_q: int, some: slice) -> F64:
        """The same for ``past_call``, for some of its rows."""
        keys, values = self.seen()
        q, spec = _taken(self.rows.q, self.past, n_q)[some], self.cache.plan.layers[0].spec
        return np.stack([attend64(spec, row, keys, values) for row in q])

    def seen(self) -> tuple[F64, F64]:
        """What the next row sees: every record decoded by the reference, else the exact row."""
        cache, spec = self.cache, self.cache.plan.layers[0].spec
        pages = cache.state[0].pages[cache.class_of[0]]
        found = []
        for side, bits, exact in (
            (Side.K, spec.k_bits, self.rows.k),
            (Side.V, spec.v_bits, self.rows.v),
        ):
            assert bits is not None
            buffers = cache.buffers[0]
            pool = np.asarray(buffers.k_records if side is Side.K else buffers.v_records)
            nbytes = HeadLayout(side, bits, spec.head_dim).nbytes
            records = pool.reshape(spec.n_kv_head, -1, nbytes)
            known: dict[int, F64] = {}
            stage = reference.stage_rows(exact).astype(np.float64)
            plain = reference.rotate(stage, np.float64)
            out = _taken(plain, 0, self.past)
            for group, slot in enumerate(pages.table):
                stop = (group + 1) * GROUP
                if group in pages.blocks:  # the newest 128 rows are seen exactly
                    stop = min(stop, self.past - GROUP + 1)
                if slot < 0 or stop <= group * GROUP:  # sinks have no record
                    continue
                content = group % _BATCH
                if content not in known:
                    tiles = [reference.decode(r, side, bits, spec.head_dim) for r in records[:, slot]]
                    known[content] = reference.rotate(np.stack(tiles, 1), np.float64)
                out[group * GROUP : stop] = known[content][: stop - group * GROUP]
            found.append(out)
        return found[0], found[1]


class _Recorder:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.last: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def run(self, entry: str, op: Any, call: Any) -> None:
        self.last = (entry, op, call)
        self._device.run(entry, op, call)


def _taken(rows: NDArray[Any], start: int, n: int) -> NDArray[Any]:
    """Rows ``start .. start + n`` of the endless repetition of one period."""
    found: NDArray[Any] = np.take(rows, np.arange(start, start + n) % PERIOD, axis=0)
    return found


def tokens(rows: NDArray[np.float32], n: int) -> F32:
    """The first ``n`` rows, head by head and contiguous: [n_kv_head, n, D]."""
    return np.ascontiguousarray(_taken(rows, 0, n).transpose(1, 0, 2))


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
