"""Masks and ALiBi slopes as the CPU kernels want them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import floor, log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.calls import SeqView


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
