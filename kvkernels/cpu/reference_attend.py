"""Attention in float64, the oracle that every entry is compared with (semantics.md B1 to B5).

Rows that a query cannot see are dropped before any arithmetic, so NaN in them never leaks out.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.errors import InputError
from kvkernels.op import WINDOW_KINDS
from kvkernels.values import name_of

F64 = NDArray[np.float64]


def alibi_slopes(n_head: int, max_bias: float) -> F64:
    """ALiBi slope of every head, float64 ``[n_head]``, for any n_head; all 1 when max_bias <= 0.

    With n2 the largest power of two not above n_head: heads below n2 get 2^(-max_bias / n2) to the
    power h + 1, the others 2^(-max_bias / 2 / n2) to the power 2 (h - n2) + 1.
    """
    if max_bias <= 0:
        return np.ones(n_head)
    n2 = 1 << (n_head.bit_length() - 1)
    m0, m1 = 2.0 ** (-max_bias / n2), 2.0 ** (-max_bias / 2 / n2)
    return np.array([m0 ** (h + 1) if h < n2 else m1 ** (2 * (h - n2) + 1) for h in range(n_head)])


def visible(
    q_pos: NDArray[Any],
    k_pos: NDArray[Any],
    *,
    causal: bool = True,
    window: int | None = None,
    window_kind: str = "sliding",
) -> NDArray[np.bool_]:
    """bool ``[n_q, n_kv]``: rule B4. A negative key position marks an unused row: never visible.

    A window of W shows the query at i the key at j: ``sliding`` i - W < j (W counts the query
    itself; without ``causal`` it is symmetric, abs(i - j) < W); ``chunked`` j >= i // W * W;
    ``symmetric`` abs(i - j) <= W // 2. With ``causal`` j <= i besides.
    """
    i, j = np.asarray(q_pos, np.int64)[:, None], np.asarray(k_pos, np.int64)[None, :]
    name_of("window_kind", window_kind, WINDOW_KINDS)
    see = np.broadcast_to(j >= 0, (i.shape[0], j.shape[1]))
    if causal:
        see = see & (j <= i)
    if window is not None and window_kind == "chunked":
        see = see & (j >= i // window * window)
    elif window is not None:
        reach = window // 2 if window_kind == "symmetric" else window - 1
        see = see & (np.abs(i - j) <= reach)
    return see


def attend(
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    *,
    scale: float,
    q_pos: NDArray[Any],
    k_pos: NDArray[Any],
    softcap: float = 0.0,
    alibi_max_bias: float = 0.0,
    window: int | None = None,
    window_kind: str = "sliding",
    causal: bool = True,
    mask: NDArray[Any] | None = None,
    sink_logits: NDArray[Any] | None = None,
    return_lse: bool = False,
) -> Any:
    """One softmax over all visible rows; float64 ``[n_q, n_head, D_v]``, with lse when asked.

    q ``[n_q, n_head, D]``, k ``[n_kv, n_kv_head, D]``, v ``[n_kv, n_kv_head, D_v]``; positions are
    integers ``[n_q]`` and ``[n_kv]``. ``mask`` broadcasts to ``[n_head, n_q, n_kv]``: bool (True =
    visible) or additive (-inf = invisible, else added after the cap, not multiplied by a slope).
    ALiBi adds slope * -abs(q_pos - k_pos). ``sink_logits`` ``[n_head]`` enter the denominator only.

    A row that sees nothing is exactly 0, with or without sinks. ``lse`` is ``[n_q, n_head]``,
    the log of the denominator with the sinks in it, -inf where that is 0.
    Raises `InputError` when n_head is not a multiple of n_kv_head or shapes disagree (A4).
    """
    n_q, n_head, _ = q.shape
    n_kv, n_kv_head, d = k.shape
    if n_head % n_kv_head:
        raise InputError("n_head", found=n_head, needed=f"a multiple of n_kv_head = {n_kv_head}")
    if v.shape[:2] != (n_kv, n_kv_head) or q.shape[2] != d:
        raise InputError("k, v", found=f"{k.shape}, {v.shape}", needed=f"to match q {q.shape}")
    gqa = n_head // n_kv_head
    see = visible(q_pos, k_pos, causal=causal, window=window, window_kind=window_kind)
    slopes = alibi_slopes(n_head, alibi_max_bias)
    full = None if mask is None else np.broadcast_to(mask, (n_head, n_q, n_kv))
    additive = full is not None and full.dtype != np.bool_
    distance = np.abs(np.asarray(q_pos, np.int64)[:, None] - np.asarray(k_pos, np.int64)[None, :])
    out = np.zeros((n_q, n_head, v.shape[2]))
    lse = np.full((n_q, n_head), -np.inf)
    for h in range(n_head):
        kh, vh = k[:, h // gqa].astype(np.float64), v[:, h // gqa].astype(np.float64)
        for i in range(n_q):
            row = see[i]
            if full is not None:
                row = row & (full[h, i] != -np.inf if additive else full[h, i])
            rows = np.flatnonzero(row)
            s = scale * (kh[rows] @ q[i, h].astype(np.float64))
            if softcap > 0:  # cap first, then the bias (B1, F17)
                s = softcap * np.tanh(s / softcap)
            if alibi_max_bias > 0:
                s = s - slopes[h] * distance[i, rows]
            if full is not None and additive:
                s = s + full[h, i, rows].astype(np.float64)
            sink = -math.inf if sink_logits is None else float(sink_logits[h])
            top = max(float(s.max(initial=-np.inf)), sink)
            if top == -math.inf:
                continue  # nothing to see: exactly 0, and no -inf - -inf
            p = np.exp(s - top)
            total = p.sum() + math.exp(sink - top)
            live = p > 0  # a -inf score is skipped, whatever its value row holds (B3)
            out[i, h] = (p[live] @ vh[rows[live]]) / total
            lse[i, h] = top + math.log(total)
    return (out, lse) if return_lse else out
