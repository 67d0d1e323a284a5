"""How much local (shared) memory an entry needs: a requirement of the operation and the device."""

from __future__ import annotations

from collections.abc import Callable

from kvkernels.capabilities import Requirement, fits
from kvkernels.op import GROUP, AttentionOp
from kvkernels.simt.launch import DECODE_BLOCK, prefill_block

# Arrays of the sources that an entry launches, in bytes.
_WORD, _F64 = 4, 8
_PITCH, _SECTIONS = 136, 4  # geometry.inc
_ROW_WORDS, _TOPS = 5, 2  # softmax.inc
_LISTS = (7 + 8 + 10) * _WORD  # items.inc: begins, item, sequence
_HALF_PITCH = 144  # attend_mma.inc
_LINES = 256  # balance.inc
_RUN, _RUN_PITCH, _CHANNELS = 32, 129, 128  # elements.inc
_SIDE, _QUERIES, _PANEL = 32, 8, 16  # moments.inc, feedback.inc
_WIDEST = 512  # channels of a head in records
_SCAN = (128 + 16) * _WORD  # check.inc: before every attention and every encoding


def _attend(op: AttentionOp, rows: int) -> int:
    arrays = 3 * _PITCH + _SECTIONS + _TOPS + _ROW_WORDS
    return max(rows * arrays * _WORD + _LISTS, _merge(op))


def _attend_mma(op: AttentionOp, rows: int) -> int:
    slices = -(-op.head_dim_v // GROUP)
    words = (rows + slices) * (_PITCH + _SECTIONS) + rows * (2 * _PITCH + 4 + _TOPS + _ROW_WORDS)
    # Sources other than records go through the portable kernel.
    return max(words * _WORD + 2 * rows * _HALF_PITCH + _LISTS, _attend(op, rows))


def _merge(op: AttentionOp) -> int:
    return max(op.head_dim_k, op.head_dim_v) * _WORD


def _prefill(op: AttentionOp) -> int:
    return prefill_block(max(op.head_dim_k, op.head_dim_v))


def _mma(op: AttentionOp) -> int:
    return 8 if max(op.head_dim_k, op.head_dim_v) > GROUP else 16


def _turn(op: AttentionOp) -> int:
    """Rows of a block with room for one channel more each (``turn.inc``)."""
    return max(1, 4096 // op.head_dim_k) * (op.head_dim_k + 1) * _WORD


def _commit(op: AttentionOp) -> int:
    return max(_turn(op), (3 * _LINES + 32) * _WORD)


def _commit_aware(op: AttentionOp) -> int:
    axes = (3 * _LINES + 32) * _WORD + 2 * (GROUP + _LINES) * _F64
    moments = 2 * _SIDE * (_SIDE + 1) * _F64
    attention = _WIDEST * _QUERIES * _WORD + _QUERIES * (GROUP + 16) * _F64
    feedback = (6 * _PANEL + 3) * _PANEL * _F64 + _PANEL * _WORD
    return max(_turn(op), axes, moments, attention, feedback, _WIDEST * (_F64 + _WORD))


def _rows(codes: int) -> int:
    return _RUN * (_RUN_PITCH * _WORD + codes)


_NEEDS: dict[str, Callable[[AttentionOp], int]] = {
    "attend_portable": lambda op: _attend(op, DECODE_BLOCK),
    "attend_prefill_portable": lambda op: _attend(op, _prefill(op)),
    "attend_materialized": lambda op: max(_attend(op, _prefill(op)), _turn(op)),
    "attend_mma": lambda op: _attend_mma(op, _mma(op)),
    "attend_prefill_mma": lambda op: _attend_mma(op, _mma(op)),
    "commit": _commit,
    "commit_aware": _commit_aware,
    "commit_rows": lambda op: _rows(_CHANNELS),
    "commit_tail": lambda op: _rows(0),
    "materialize": _turn,
}


def local_bytes(entry: str, op: AttentionOp) -> int:
    """Upper bound of the bytes of local memory that one work-group of ``entry`` uses for ``op``,
    whatever its number of queries. A kernel may need less, never more.
    """
    return max(_NEEDS[entry.partition("/")[2]](op), _SCAN)


def fits_local(entry: str) -> Requirement:
    """What ``entry`` needs of local memory is at most what the device has."""
    return fits("local_bytes", "local_memory", lambda op: local_bytes(entry, op))
