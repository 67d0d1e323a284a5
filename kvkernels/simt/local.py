"""How much local (shared) memory an entry needs: a requirement of the operation and the device."""

from __future__ import annotations

from kvkernels.capabilities import Requirement, fits
from kvkernels.op import AttentionOp

#: bytes that every kernel stays within up to ``_DIM`` channels: the least that OpenCL grants a GPU
_BOUND = 32768
_DIM = 512


def local_bytes(entry: str, op: AttentionOp) -> int:
    """Upper bound of the bytes of local memory that one work-group of ``entry`` uses for ``op``.

    A kernel may need less, never more. Standard types come with heads of any multiple of 32
    channels, and what a kernel keeps per channel grows with them.
    """
    widest = max(op.head_dim_k, op.head_dim_v)
    return max(_BOUND, -(-_BOUND * widest // _DIM))


def fits_local(entry: str) -> Requirement:
    """What ``entry`` needs of local memory is at most what the device has."""
    return fits("local_bytes", "local_memory", lambda op: local_bytes(entry, op))
