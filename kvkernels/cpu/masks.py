"""Masks and ALiBi slopes as the CPU kernels want them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import floor, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.calls import Batch, SeqView
from kvkernels.cpu.columns import NO_CUT
from kvkernels.op import LayerSpec


@lru_cache(maxsize=64)
def slopes(n_head: int, max_bias: float) -> NDArray[np.float32]:
    """ALiBi slope per head, float32 [n_head]; all 0 when ``max_bias`` is 0 (background-cache.md
    2.3).
    """
    if max_bias <= 0:
        return np.zeros(n_head, np.float32)
    power = 2 ** floor(log2(n_head))
    m0, m1 = 2.0 ** (-max_bias / power), 2.0 ** (-max_bias / 2 / power)
    values = [m0 ** (h + 1) if h < power else m1 ** (2 * (h - power) + 1) for h in range(n_head)]
    return np.array(values, np.float32)


def additive(mask: Any, shape: tuple[int, int, int]) -> NDArray[np.float32]:
    """A 3-d float32 C-contiguous additive mask; axes of size 1 stay 1 (no copy per head for a
    shared mask).

    ``shape`` is (n_head, n_q, n_kv), already checked to be what ``mask`` broadcasts to. bool: True
    = visible.
    """
    array = np.asarray(mask)
    array = array.reshape((1,) * (3 - array.ndim) + array.shape)
    if array.shape[2] != shape[2]:
        array = np.broadcast_to(array, (*array.shape[:2], shape[2]))
    if array.dtype == np.bool_:
        return np.where(array, np.float32(0), np.float32(-np.inf))
    return np.ascontiguousarray(array, np.float32)


def flatten(
    seqs: NDArray[np.int64],
    views: Sequence[SeqView],
    masks: Sequence[Any | None],
    n_head: int,
    current: bool,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """All masks of a batch in one flat array, and ``seqs`` with offset and strides filled in."""
    seqs, parts, at = seqs.copy(), [], 0
    for row, view, mask in zip(seqs, views, masks, strict=True):
        if mask is None:
            continue
        flat = additive(mask, (n_head, view.n_q, view.n_past + (view.n_q if current else 0)))
        heads, queries, keys = flat.shape
        row[5:8] = at, queries * keys if heads > 1 else 0, keys if queries > 1 else 0
        parts.append(flat.reshape(-1))
        at += flat.size
    return seqs, np.concatenate(parts)


def newest_cuts(batch: Batch, layer: LayerSpec) -> NDArray[np.int64]:
    """The oldest row that every query row takes from its ring, when no mask hides any."""
    cuts = np.full(batch.n_rows, NO_CUT, np.int64)
    for v in batch.views:
        if v.tail:
            end = v.n_past + v.n_q
            own = _after_newest(layer, np.arange(v.n_past, end), end) - v.tail.rows
            cuts[v.q_start : v.q_start + v.n_q] = np.maximum(own, v.tail.start)
    return cuts


def masked_cuts(batch: Batch, layer: LayerSpec, masks: Sequence[Any | None]) -> NDArray[np.int64]:
    """The oldest row every query row takes from its ring: the N-th newest that it sees (T6).

    A row counts as seen when some head sees it; masks have no say about heads in a tail.
    """
    cuts = newest_cuts(batch, layer)
    for view, mask in zip(batch.views, masks, strict=True):
        if mask is None or view.tail is None:
            continue
        start, end = view.tail.start, view.n_past + view.n_q
        array = np.asarray(mask)
        array = array.reshape((1,) * (3 - array.ndim) + array.shape)
        if array.shape[2] > 1:
            array = array[:, :, start:]
        seen = (array if array.dtype == np.bool_ else array > -np.inf).any(0)
        keys, queries = np.arange(start, end), np.arange(view.n_past, end)[:, None]
        seen = (
            seen & (keys >= _oldest(layer, queries)) & (keys < _after_newest(layer, queries, end))
        )
        # Visible rows from each key on; the N newest are where that is at most N.
        newer = np.cumsum(seen[:, ::-1], axis=1)[:, ::-1]
        first = np.argmax(newer <= view.tail.rows, axis=1)
        cuts[view.q_start : view.q_start + view.n_q] = start + first
    return cuts


def _after_newest(layer: LayerSpec, queries: NDArray[np.int64], end: int) -> Any:
    """One past the newest key that each query may see of a sequence of ``end`` rows."""
    if layer.causal:
        return queries + 1
    ahead = {"sliding": layer.window or 0, "symmetric": (layer.window or 0) // 2 + 1}
    if layer.window is None or layer.window_kind not in ahead:
        return np.full_like(queries, end)
    return np.minimum(queries + ahead[layer.window_kind], end)


def _oldest(layer: LayerSpec, queries: NDArray[np.int64]) -> Any:
    if layer.window is None:
        return 0
    if layer.window_kind == "chunked":
        return queries // layer.window * layer.window
    back = layer.window // 2 if layer.window_kind == "symmetric" else layer.window - 1
    return queries - back
