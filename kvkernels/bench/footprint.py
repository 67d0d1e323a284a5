"""Bytes that stay, bytes that pass, and the time of an import."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

from kvkernels.backend import Device
from kvkernels.bench.measure import Effort
from kvkernels.bench.report import Result
from kvkernels.bench.workload import filled, random_rows
from kvkernels.op import GROUP, LayerSpec
from kvkernels.planner import Limits, plan
from kvkernels.records.layout import HeadLayout, Side
from kvkernels.registry import open_device

IMPORT_TARGET_S = 0.050
_HALF = 2


def persistent(device: Device, effort: Effort) -> Iterator[Result]:
    """Allocated bytes against the arithmetic of the format, and against an F16 cache."""
    n_ctx = 4096
    for k, v in ((2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (8, 8), (5, 4)):
        spec = LayerSpec(
            n_head=32, n_kv_head=8, head_dim=128, k=f"kvarn{k}", v=f"kvarn{v}", encoder="published"
        )
        made = plan([spec], device, Limits(n_ctx=n_ctx))
        buffers = made.allocate().buffers[0]
        parts = (buffers.k_records, buffers.v_records, buffers.k_exact, buffers.v_exact)
        allocated = sum(part.nbytes for part in parts)
        record = HeadLayout(Side.K, k, 128).nbytes + HeadLayout(Side.V, v, 128).nbytes
        exact = 2 * GROUP * spec.head_dim * _HALF
        expected = spec.n_kv_head * (buffers.slots * record + buffers.blocks * exact)
        f16 = 2 * n_ctx * spec.n_kv_head * spec.head_dim * _HALF
        same = allocated == expected == made.memory.kv_resident_bytes
        yield Result(
            case=f"bytes/k{k}v{v}-d128-h8-n{n_ctx}",
            device=device.caps.id,
            ratio=f16 / allocated,
            baseline="f16-bytes",
            error=0.0 if same else abs(allocated - expected) / expected,
            value=float(allocated),
            unit="bytes",
            target="allocated = planned = layout arithmetic",
            outcome="ok" if same else "wrong",
            note=f"records alone {f16 / (n_ctx // GROUP * spec.n_kv_head * record):.2f}x smaller",
        )


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
