"""Numbers that callers and kernels share. No Numba here:
with shipped kernels a process needs none.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: where keys come from, in the order in which ``kernels/attend.py`` takes them, and so the kinds of
#: its work items: sealed records and exact blocks (both rotated), tiles of standard types, the ring
#: of the precision tail, the step's own rows; ALL: an item that takes all of them
BODY, EXACT, TILES, RING, CURRENT, ALL = range(6)
#: what ``shape`` says of a window, in the order of ``op.WINDOW_KINDS``
SLIDING, CHUNKED, SYMMETRIC = range(3)
#: no tail: every key is older than this position
NO_CUT = 1 << 62
#: rows that one pass of a micro-kernel serves, largest first; a pass over n rows is cut into these
ROW_BLOCKS = (4, 2, 1)
#: forms of activations, see ``kernels/dot.py``
F32, I8, I16 = 0, 1, 2
#: standard cache types as kernels know them (``kernels/standard.py``); the float ones are also the
#: element kinds of ``kernels/matrix.py``
STANDARD = {
    name: kind
    for kind, name in enumerate(("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"))
}

_GROUP = 128
#: float32 and float64 words that sealing a tile works in (``kernels/balance.py``)
F32_WORK, F64_WORK = 17920, 512
#: where the errors begin in the float64 workspace of the ``aware`` encoder (``kernels/metric.py``)
ERRORS_AT = 3584


def seal_workspace() -> tuple[Any, Any, Any]:
    """Workspaces of ``kernels/seal.py``, one set for every thread that seals."""
    return (
        np.empty(F32_WORK, np.float32),
        np.empty(F64_WORK, np.float64),
        np.empty(_GROUP * _GROUP, np.uint8),
    )


def aware_workspace(dim: int) -> tuple[Any, ...]:
    """Workspaces of ``kernels/aware.py``, one set for every thread that seals."""
    n = max(dim, _GROUP)
    return (
        np.empty(F32_WORK, np.float32),
        np.empty(ERRORS_AT + 16 * n, np.float64),
        np.empty(n * n, np.float64),
        np.empty(n, np.int64),
        np.empty(n * _GROUP, np.uint8),
    )
