"""Joining attention results over disjoint rows (semantics B6)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Join two attentions over disjoint rows: out [..., n_head, D] and natural-log lse [...,
    n_head] (B6).

    An empty side (lse = -inf) contributes nothing; both empty gives 0 and -inf.
    """
    a, b = np.asarray(lse_a, np.float64), np.asarray(lse_b, np.float64)
    top = np.maximum(a, b)
    safe = np.where(np.isneginf(top), 0.0, top)
    wa, wb = np.exp(a - safe), np.exp(b - safe)
    total = wa + wb
    share = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)
    out = np.asarray(out_a) * (wa * share)[..., None] + np.asarray(out_b) * (wb * share)[..., None]
    with np.errstate(divide="ignore"):
        lse = safe + np.log(total)
    return out.astype(np.float32), lse.astype(np.float32)
