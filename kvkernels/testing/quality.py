"""How far attention moves when keys and values go through records: the encoders' own measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.cpu import reference, reference_aware
from kvkernels.records.layout import GROUP, Side

F64 = NDArray[np.float64]
#: of one KV head of one group: (rows [128, D], side, bits, queries [heads, 128, D], keys [128, D])
Encoder = Callable[[NDArray[Any], Side, int, NDArray[Any], NDArray[Any]], NDArray[np.uint8]]


def published(
    x: NDArray[Any], side: Side, bits: int, q: NDArray[Any], keys: NDArray[Any]
) -> NDArray[np.uint8]:
    """The published encoder, by the reference."""
    return reference.encode(x, side, bits)


def aware(
    x: NDArray[Any], side: Side, bits: int, q: NDArray[Any], keys: NDArray[Any]
) -> NDArray[np.uint8]:
    """The aware encoder, by the reference."""
    return reference_aware.encode(x, side, bits, q=q, keys=keys)


def _through(rows: F64, side: Side, bits: int, q: F64, k: F64, encoder: Encoder) -> F64:
    """Rows of one KV head as a cache keeps them: first and last group exact, records between."""
    out = rows.copy()
    for start in range(GROUP, len(rows) - GROUP, GROUP):
        part = slice(start, start + GROUP)
        x, keys, queries = (a.astype(np.float32) for a in (rows[part], k[part], q[:, part]))
        record = encoder(x, side, bits, queries, keys)
        decoded = reference.decode(record, side, bits, rows.shape[1]).astype(np.float64)
        out[part] = reference.rotate(decoded, np.float64)
    return out


def output_error(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], bits: int, encoder: Encoder
) -> float:
    """Relative error of attention outputs, pooled over layers and heads: queries of the last group
    against all keys so far, the first group exact, both sides at ``bits``.

    q [layers, n_head, n, D], k and v [layers, n_kv_head, n, D]: one text, RoPE applied, ``n`` a
    multiple of 128.
    """
    layers, n_kv_head, n, dim = k.shape
    gqa = q.shape[1] // n_kv_head
    position = np.arange(n - GROUP, n)
    wrong = right = 0.0
    for layer, head in np.ndindex(layers, n_kv_head):
        heads = q[layer, head * gqa : (head + 1) * gqa].astype(np.float64)
        exact = [side[layer, head].astype(np.float64) for side in (k, v)]
        stored = [
            _through(rows, side, bits, heads, exact[0], encoder)
            for rows, side in zip(exact, (Side.K, Side.V), strict=True)
        ]
        for queries in heads:
            want, got = (
                _attend(queries[position] * dim**-0.5, keys, values, position)
                for keys, values in (exact, stored)
            )
            wrong += float(np.square(got - want).sum())
            right += float(np.square(want).sum())
    return float(np.sqrt(wrong / right))


def _attend(q: F64, k: F64, v: F64, position: NDArray[Any]) -> F64:
    score = np.where(np.arange(len(k)) <= position[:, None], q @ k.T, -np.inf)
    weight = np.exp(score - score.max(1, keepdims=True))
    return np.asarray((weight @ v) / weight.sum(1, keepdims=True))
