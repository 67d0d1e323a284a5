"""Bytes that stay, bytes that pass, and the time of an import."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from kvkernels.backend import Device
from kvkernels.bench.measure import Effort
from kvkernels.bench.report import Result
from kvkernels.bench.workload import filled, random_rows
from kvkernels.op import GROUP, KVARN_BITS, STANDARD_TYPES, LayerSpec
from kvkernels.planner import Limits, plan
from kvkernels.quants import block_type
from kvkernels.records.layout import HeadLayout, Side
from kvkernels.registry import open_device
from kvkernels.storage import Body, Storage

IMPORT_TARGET_S = 0.050
_HALF = 2


def _kept() -> Iterator[tuple[str, LayerSpec]]:
    """Every kind of body, with and without a tail; the last two are windows that a ring covers."""
    for k, v in ((2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (8, 8), (5, 4)):
        yield f"k{k}v{v}", _layer(f"kvarn{k}", f"kvarn{v}")
    for kind in STANDARD_TYPES:
        yield kind, _layer(kind, kind)
    yield "k4v4-tail1000", _layer("kvarn4", "kvarn4", tail=1000)
    yield "q8_0-tail1000", _layer("q8_0", "q8_0", tail=1000)
    yield "f32-q4_0-tail64", _layer("f32", "q4_0", tail=64, tail_dtype="f16")
    yield "k4v4-window512", _layer("kvarn4", "kvarn4", window=512)
    yield "k4v4-window512-tail512", _layer("kvarn4", "kvarn4", window=512, tail=512)
    yield "q4_0-window500-tail500", _layer("q4_0", "q4_0", window=500, tail=500)


def _layer(k: str, v: str, **options: Any) -> LayerSpec:
    heads: dict[str, Any] = {"n_head": 32, "n_kv_head": 8, "head_dim": 128}
    return LayerSpec(**heads, k=k, v=v, encoder="published", **options)


def persistent(device: Device, effort: Effort) -> Iterator[Result]:
    """Allocated bytes against the arithmetic of the format, and against an F16 cache."""
    n_ctx = 4096
    for name, spec in _kept():
        made = plan([spec], device, Limits(n_ctx=n_ctx))
        buffers = made.allocate().buffers[0]
        parts = [buffers.k_records, buffers.v_records, buffers.k_exact, buffers.v_exact]
        parts += [buffers.k_ring, buffers.v_ring]
        allocated = sum(part.nbytes for part in parts)
        slot, ring = _slot_bytes(buffers.storage), _ring_bytes(buffers.storage)
        exact = 2 * GROUP * spec.head_dim * _HALF if spec.is_kvarn else 0
        pages = buffers.pages
        expected = pages.slots * slot + pages.blocks * exact + pages.rings * ring
        expected *= spec.n_kv_head
        rows = min(n_ctx, spec.window or n_ctx)
        f16 = 2 * rows * spec.n_kv_head * spec.head_dim * _HALF
        same = allocated == expected == made.memory.kv_resident_bytes
        body = 2 * GROUP * spec.head_dim * _HALF / slot if slot else None
        yield Result(
            case=f"bytes/{name}-d128-h8-n{n_ctx}",
            device=device.caps.id,
            ratio=f16 / allocated,
            baseline="f16-bytes",
            error=0.0 if same else abs(allocated - expected) / expected,
            value=float(allocated),
            unit="bytes",
            target="allocated = planned = layout arithmetic",
            outcome="ok" if same else "wrong",
            note=f"its body alone {body:.2f}x smaller" if body else "a ring and no body",
        )


def _slot_bytes(storage: Storage) -> int:
    """128 tokens of K and V of one head: a record each, or as many rows of GGML blocks."""
    if storage.body is Body.NONE:
        return 0
    if storage.body is Body.RECORDS:
        sides = zip((Side.K, Side.V), (storage.k, storage.v), strict=True)
        return sum(HeadLayout(side, KVARN_BITS[kind], 128).nbytes for side, kind in sides)
    return sum(GROUP * block_type(kind).row_bytes(128) for kind in (storage.k, storage.v))


def _ring_bytes(storage: Storage) -> int:
    """One head's ring: rows of V, and channels of K in whole vectors of 64 tokens."""
    if not storage.tail_rows:
        return 0
    rows = storage.tail_rows + storage.reserve
    k, v = (block_type(kind).row_bytes(128) for kind in storage.ring_types)
    return -(-rows // 64) * 64 * k + rows * v


def transient(device: Device, effort: Effort) -> Iterator[Result]:
    """High water of workspace for a prefill, and for one with four times as many scores (W3)."""
    peaks = []
    spec = LayerSpec(n_head=32, n_kv_head=8, head_dim=128, encoder="published")
    for n_q, n_kv in ((128, 1024), (256, 2048)):
        fresh = open_device(device.caps.id)  # the high water begins anew
        rows = random_rows(spec, n_kv)
        cache = filled(spec, fresh, rows, n_kv - n_q, room=n_q)
        step = cache.step({0: n_q})
        step.attend(0, *(getattr(rows, name)[n_kv - n_q :] for name in "qkv"))
        step.discard()
        peaks.append(fresh.transient_bytes)
        growth = peaks[-1] / peaks[0]
        entry = cache.plan.explain(0, n_q=n_q, n_kv=n_kv)
        yield Result(
            case=f"transient/q{n_q}-n{n_kv}",
            device=device.caps.id,
            entry=entry.entry,
            route=str(entry.route),
            ratio=growth,
            baseline="transient/q128-n1024",
            value=float(peaks[-1]),
            unit="bytes",
            target="n_q * n_kv grows 4x, bytes at most 2x",
            outcome="ok" if growth <= 2 else "miss",
        )


def import_time(device: Device, effort: Effort) -> Iterator[Result]:
    """``import kvkernels`` in a fresh interpreter, as ``-X importtime`` counts it; best of some."""
    command = [sys.executable, "-X", "importtime", "-c", "import kvkernels"]
    taken = []
    for _ in range(max(3, effort.rounds // 2)):
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        line = re.search(r"\|\s+(\d+) \|\s+kvkernels$", report, re.MULTILINE)
        assert line is not None
        taken.append(int(line.group(1)) * 1e-6)
    taken.sort()
    median = taken[len(taken) // 2]
    yield Result(
        case="import/kvkernels",
        device=device.caps.id,
        median_s=median,
        iqr_s=taken[len(taken) * 3 // 4] - taken[len(taken) // 4],
        min_s=taken[0],
        value=median,
        unit="s",
        target=f"<= {IMPORT_TARGET_S * 1e3:g} ms (absolute: reported, not gated)",
        outcome="ok" if median <= IMPORT_TARGET_S else "miss",
    )
