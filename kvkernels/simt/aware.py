"""The aware encoder's launches: axes, metrics, factors, codes (codec.md 9)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.calls import CommitCall, LayerBuffers
from kvkernels.cpu.reference import rotate
from kvkernels.op import LayerSpec
from kvkernels.records.layout import GROUP
from kvkernels.simt.driver import Driver, scalar
from kvkernels.simt.program import Program
from kvkernels.simt.scratch import Scratch

_F64, _HALF = 8, 2
#: side of a tile of a metric, queries of a block of threads, rows of a panel (``moments.inc``,
#: ``feedback.inc``)
_SIDE, _QUERIES, _PANEL = 32, 8, 16

_AXES = Program.of(("common", "exact", "nearest", "balance", "axes"), {"aware_axes": 256})
_MOMENTS = Program.of(
    ("common", "exact", "moments"), {"key_moment": 256, "attention": 128, "value_moment": 256}
)
_FEEDBACK = Program.of(
    ("common", "exact", "lines", "nearest", "feedback"), {"factor": 256, "feed_back": 256}
)


def _shapes(layer: LayerSpec, *, weighed: bool) -> dict[str, tuple[tuple[int, ...], type]]:
    """Workspaces of one group by name; ``weighed``: by its own queries, not by a given moment."""
    n, dim, heads = layer.n_kv_head, layer.head_dim, layer.n_head
    slices = max(1, dim // GROUP)
    panels = (n * _runs(dim), max(dim, GROUP), _PANEL)
    found: dict[str, tuple[tuple[int, ...], type]] = {
        "turned": ((2 * n * slices, GROUP * GROUP), np.uint16),
        "k factor": ((n, dim, dim), np.float64),
        "k order": ((n, dim), np.int32),
        "errors": (panels, np.float64),
        "codes": (panels, np.uint8),
    }
    if weighed:
        found |= {
            "k moment": ((n, dim, dim), np.float64),
            "attention": ((heads, GROUP, GROUP), np.float64),
            "v moment": ((n, GROUP, GROUP), np.float64),
            "v factor": ((n, GROUP, GROUP), np.float64),
            "v order": ((n, GROUP), np.int32),
        }
    return found


def _runs(dim: int) -> int:
    """Blocks of threads of one head: sixteen tokens of K, or channels of V, each."""
    return (GROUP + dim) // _PANEL


def workspaces(layer: LayerSpec, *, weighed: bool) -> dict[str, int]:
    """Bytes of the workspaces in which one group is sealed, by name: 10.8 MiB in all for 8 KV heads
    of 128 channels and 32 heads.
    """
    return {
        _named(name): int(np.prod(shape)) * np.dtype(kind).itemsize
        for name, (shape, kind) in _shapes(layer, weighed=weighed).items()
    }


def _named(name: str) -> str:
    return f"aware {name}"


def seal(
    driver: Driver,
    call: CommitCall,
    listed: NDArray[np.int32],
    tiles: Any | None,
    scratch: Scratch,
) -> None:
    """Enqueue the sealing of complete groups, ``listed`` int32 [groups, 3]: block (below 0: of the
    transient ``tiles``), slot, whether K's axes may be fitted.
    """
    layer, buffers = call.layer, call.buffers
    given = _rotated_moment(driver, buffers)
    groups, n, dim = len(listed), layer.n_kv_head, layer.head_dim
    work: dict[str, Any] = {
        name: scratch.get(_named(name), (groups, *shape), kind)
        for name, (shape, kind) in _shapes(layer, weighed=given is None).items()
    }
    items = scratch.constant(listed)
    assert layer.k_bits is not None
    assert layer.v_bits is not None
    exact = (buffers.k_exact, buffers.v_exact, tiles, items, buffers.k_records, buffers.v_records)
    numbers = tuple(
        scalar(x)
        for x in (
            n, 2 * n + layer.n_head, buffers.blocks, buffers.slots, dim, layer.k_bits,
            layer.v_bits,
        )
    )  # fmt: skip
    slices = max(1, dim // GROUP)
    driver.launch(_AXES, "aware_axes", (groups * slices, n, 2), (*exact, work["turned"], *numbers))
    if given is None:
        _moments(driver, call, groups, tiles, items, work)
    args = (
        items, buffers.k_records, work["k moment"] if given is None else given,
        work.get("v moment"), work["k factor"], work.get("v factor"), work["k order"],
        work.get("v order"),
        *(scalar(x) for x in (n, buffers.slots, dim, layer.k_bits, int(given is not None))),
    )  # fmt: skip
    driver.launch(_FEEDBACK, "factor", (groups, n, 2 if given is None else 1), args)
    args = (
        *exact, work["k factor"], work.get("v factor"), work["k order"], work.get("v order"),
        work["errors"], work["codes"], scalar(3 if given is None else 1), *numbers,
    )  # fmt: skip
    driver.launch(_FEEDBACK, "feed_back", (_runs(dim), n, groups), args)


def _moments(
    driver: Driver, call: CommitCall, groups: int, tiles: Any, items: Any, work: dict[str, Any]
) -> None:
    """Both metrics of every group and KV head, from staged queries."""
    layer, buffers = call.layer, call.buffers
    n, heads, dim = layer.n_kv_head, layer.n_head, layer.head_dim
    numbers = tuple(scalar(x) for x in (n, heads, buffers.blocks, dim))
    args = (buffers.q_exact, tiles, items, work["k moment"], *numbers)
    driver.launch(_MOMENTS, "key_moment", (_lower(dim), n, groups), args)
    high = np.float32(layer.scale)
    low = np.float32(float(layer.scale or 0) - float(high))  # kernels take no float64 scalars
    args = (
        buffers.q_exact, buffers.k_exact, tiles, items, work["attention"], *numbers, high, low,
    )  # fmt: skip
    driver.launch(_MOMENTS, "attention", (GROUP // _QUERIES, heads, groups), args)
    args = (work["attention"], work["v moment"], scalar(n), scalar(heads))
    driver.launch(_MOMENTS, "value_moment", (_lower(GROUP), n, groups), args)


def _lower(n: int) -> int:
    """Tiles of the lower triangle of a metric [n, n]."""
    return n // _SIDE * (n // _SIDE + 1) // 2


def _rotated_moment(driver: Driver, buffers: LayerBuffers) -> Any | None:
    """The layer's query moment in the rotated domain, float64 [n_kv_head, D, D]; made once."""
    if buffers.query_moment is None:
        return None
    if "rotated moment" not in buffers.prepared:
        rotated = rotate(buffers.query_moment, np.float64).swapaxes(1, 2)
        host = np.ascontiguousarray(rotate(rotated, np.float64))
        buffers.prepared["rotated moment"] = driver.upload(host)
    return buffers.prepared["rotated moment"]
