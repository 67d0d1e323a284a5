"""The demo's work: real K/V through a cache at every width, compared with float64."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.backend import Device
from kvkernels.bench.measure import Effort, measure
from kvkernels.bench.workload import (
    Rows,
    attend64,
    decoded,
    filled,
    numpy_step,
    relative_error,
)
from kvkernels.cache import Cache
from kvkernels.op import GROUP, LayerSpec
from kvkernels.planner import Limits, plan
from kvkernels.records.layout import HeadLayout, Side

SCHEMA = "kvk.demo/1"
TEXTS = ("prose", "code")
PAIRS = ((2, 2), (3, 3), (4, 4), (5, 4), (5, 5), (6, 6), (8, 8))
TILED_ROWS = 8192
DECODED_ROWS = 64
_CHUNK = 256
_EFFORT = Effort(rounds=7, least_s=0.004, warmup=1)
F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Capture:
    """K, V and Q of one layer over one text, and what they are."""

    name: str
    layer: int
    meta: str
    rows: Rows

    @property
    def n(self) -> int:
        """Tokens."""
        return len(self.rows.k)


def capture(name: str) -> Capture:
    """Load one of ``TEXTS`` from the file inside the package."""
    with as_file(files("kvkernels") / "data" / "demo_kv.npz") as path, np.load(path) as data:
        parts = {}
        for key in "QKV":
            planes, shape = data[f"{name}_{key}"], tuple(data[f"{name}_{key}_shape"])
            halves = np.ascontiguousarray(planes.T).view(np.float16).reshape(shape)
            # File: [head, token, D]; everywhere else: [token, head, D].
            parts[key] = np.ascontiguousarray(halves.transpose(1, 0, 2), np.float32)
        rows = Rows(parts["Q"], parts["K"], parts["V"])
        return Capture(name, int(data[f"{name}_layer"]), str(data[f"{name}_meta"]), rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One width on one text. Errors are relative RMS; bytes and bits as stored, axes included.

    ``k_error`` and ``v_error`` are over the rows that sit in records; ``output_error`` is
    attention, with sinks and newest rows exact as always, against float64 on the original rows.
    ``speedup`` is the NumPy F16 step's best time over ours, at ``n_kv`` rows and at ``tiled_n_kv``
    rows (the captured rows repeated: for time only).
    """

    text: str
    k: str
    v: str
    n_kv: int
    record_bytes: int
    f16_bytes: int
    bits_per_element: float
    resident_bytes: int
    k_error: float
    v_error: float
    output_error: float
    kernel_error: float
    route: str
    entry: str
    prefill_route: str
    prefill_entry: str
    step_s: float
    f16_step_s: float
    speedup: float
    tiled_n_kv: int | None
    tiled_step_s: float | None
    tiled_f16_step_s: float | None
    tiled_speedup: float | None

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict with the schema id."""
        return {"schema": SCHEMA, **asdict(self)}


def run(
    device: Device, text: Capture, *, tiled: bool, tick: Callable[[str], None]
) -> Iterator[Line]:
    """One line per pair of widths; ``tick`` is called with what begins next."""
    n, rows = text.n, text.rows
    k64, v64 = rows.k.astype(np.float64), rows.v.astype(np.float64)
    exact = [
        attend64(_spec(text, 4, 4), rows.q[i], k64[: i + 1], v64[: i + 1])
        for i in range(n - DECODED_ROWS, n)
    ]
    for k_bits, v_bits in PAIRS:
        tick(f"{text.name}: K {k_bits} bits, V {v_bits} bits")
        yield _line(device, text, _spec(text, k_bits, v_bits), np.array(exact), tiled=tiled)


def _spec(text: Capture, k_bits: int, v_bits: int) -> LayerSpec:
    return LayerSpec(
        n_head=text.rows.q.shape[1],
        n_kv_head=text.rows.k.shape[1],
        head_dim=text.rows.k.shape[2],
        k=f"kvarn{k_bits}",
        v=f"kvarn{v_bits}",
        encoder="published",
    )


def _line(device: Device, text: Capture, spec: LayerSpec, exact: F64, *, tiled: bool) -> Line:
    n, rows = text.n, text.rows
    made = plan([spec], device, Limits(n_ctx=n + GROUP, n_ubatch=_CHUNK))
    cache = made.allocate()
    first_decoded = n - DECODED_ROWS
    for start in range(0, first_decoded, _CHUNK):
        _step(cache, rows, start, min(start + _CHUNK, first_decoded))
    outputs = [_step(cache, rows, i, i + 1)[0] for i in range(first_decoded, n - 1)]
    # The last row stays out of the cache, so that its step can be timed again and again.
    expected = _expected(cache, spec, rows, n - 1)
    outputs.append(_attend(cache, rows, n - 1)[0])
    decode = made.explain(0, n_q=1, n_kv=n)
    prefill = made.explain(0, n_q=_CHUNK, n_kv=n)
    k_error, v_error, groups = _record_errors(cache, spec, rows)
    assert spec.k_bits is not None
    assert spec.v_bits is not None
    k_head = HeadLayout(Side.K, spec.k_bits, spec.head_dim)
    v_head = HeadLayout(Side.V, spec.v_bits, spec.head_dim)
    step_s, f16_s, speedup = _race(cache, spec, rows, n - 1)
    long = _tiled(device, spec, rows) if tiled else (None, None, None)
    return Line(
        text=text.name,
        k=spec.k,
        v=spec.v,
        n_kv=n,
        record_bytes=groups * spec.n_kv_head * (k_head.nbytes + v_head.nbytes),
        f16_bytes=groups * GROUP * spec.n_kv_head * spec.head_dim * 4,
        bits_per_element=(k_head.bits_per_element + v_head.bits_per_element) / 2,
        resident_bytes=cache.memory().kv_resident_bytes,
        k_error=k_error,
        v_error=v_error,
        output_error=relative_error(np.array(outputs), exact),
        kernel_error=relative_error(outputs[-1], expected),
        route=str(decode.route),
        entry=str(decode.entry),
        prefill_route=str(prefill.route),
        prefill_entry=str(prefill.entry),
        step_s=step_s,
        f16_step_s=f16_s,
        speedup=speedup,
        tiled_n_kv=TILED_ROWS if tiled else None,
        tiled_step_s=long[0],
        tiled_f16_step_s=long[1],
        tiled_speedup=long[2],
    )


def _step(cache: Cache, rows: Rows, start: int, stop: int) -> Any:
    at = slice(start, stop)
    with cache.step({0: stop - start}) as step:
        return step.attend(0, rows.q[at], rows.k[at], rows.v[at])


def _attend(cache: Cache, rows: Rows, i: int) -> Any:
    """Attention of row ``i`` over what is stored, storing nothing."""
    at = slice(i, i + 1)
    step = cache.step({0: 1})
    try:
        return step.attend(0, rows.q[at], rows.k[at], rows.v[at])
    finally:
        step.discard()


def _expected(cache: Cache, spec: LayerSpec, rows: Rows, i: int) -> F64:
    """float64 attention of row ``i`` over what the cache holds: how far the *kernel* is off."""
    k, v = decoded(cache, rows)
    k = np.concatenate([k, rows.k[i : i + 1].astype(np.float64)])
    v = np.concatenate([v, rows.v[i : i + 1].astype(np.float64)])
    return attend64(spec, rows.q[i], k, v)


def _record_errors(cache: Cache, spec: LayerSpec, rows: Rows) -> tuple[float, float, int]:
    """(K error, V error, groups) over the groups that have a record."""
    pages = cache.state[0].pages[cache.class_of[0]]
    groups = [g for g, slot in enumerate(pages.table) if slot >= 0]
    at = np.concatenate([np.arange(g * GROUP, (g + 1) * GROUP) for g in groups])
    k, v = decoded(cache, rows, newest_exact=False)
    return relative_error(k[at], rows.k[at]), relative_error(v[at], rows.v[at]), len(groups)


def _race(cache: Cache, spec: LayerSpec, rows: Rows, i: int) -> tuple[float, float, float]:
    """(own seconds, NumPy F16 seconds, ratio) of the decode step of row ``i``."""
    keys, values = rows.k[: i + 1].astype(np.float16), rows.v[: i + 1].astype(np.float16)
    f16 = numpy_step(spec, rows.q[i], keys, values)
    samples = measure({"own": lambda: _attend(cache, rows, i), "f16": f16}, _EFFORT)
    own, other = samples["own"], samples["f16"]
    # Of the best rounds: on a busy machine BLAS threads wait for each other, and a ratio of medians
    # would flatter us.
    return own.median_s, other.median_s, other.min_s / own.min_s


def _tiled(device: Device, spec: LayerSpec, rows: Rows) -> tuple[float, float, float]:
    times = -(-TILED_ROWS // len(rows.k))
    long = Rows(*(np.tile(part, (times, 1, 1))[:TILED_ROWS] for part in (rows.q, rows.k, rows.v)))
    cache = filled(spec, device, long, TILED_ROWS - 1)
    return _race(cache, spec, long, TILED_ROWS - 1)


def warm(device: Device, text: Capture) -> float:
    """Seconds until the first answer: compiles what the other widths share."""
    start = time.perf_counter()
    small = Rows(text.rows.q[:300], text.rows.k[:300], text.rows.v[:300])
    spec = _spec(text, 4, 4)
    cache = plan([spec], device, Limits(n_ctx=512, n_ubatch=_CHUNK)).allocate()
    _step(cache, small, 0, _CHUNK)
    _step(cache, small, _CHUNK, 299)
    _attend(cache, small, 299)
    return time.perf_counter() - start
