"""Masks, biases and sink logits that a caller passes: checked once,
described for the decision (B4, F35).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvkernels.backend import Device, Rows
from kvkernels.calls import SeqView
from kvkernels.errors import InputError, NonFiniteError
from kvkernels.op import LayerSpec
from kvkernels.records.layout import GROUP
from kvkernels.storage import Stored
from kvkernels.values import whole

_ADDITIVE = ("float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Bias:
    """One mask per view (or None), and the two facts a requirement can name:
    kind and row stride in elements.
    """

    masks: tuple[Any | None, ...]
    kind: str = "none"
    stride: int = 0


def by_sequence(mask: Any, seqs: Sequence[int]) -> Mapping[int, Any]:
    """What the caller passed as {sequence id: mask}; one array is fine for one sequence."""
    if mask is None:
        return {}
    if isinstance(mask, Mapping):
        unknown = [seq for seq in mask if seq not in seqs]
        if unknown:
            raise InputError("mask", found=f"sequences {unknown}", needed=f"some of {list(seqs)}")
        return mask
    if len(seqs) != 1:
        raise InputError(
            "mask",
            found=f"one array for {len(seqs)} sequences",
            needed="a mapping {sequence id: mask}",
        )
    return {seqs[0]: mask}


def check_bias(
    spec: LayerSpec, views: Sequence[SeqView], masks: Mapping[int, Any], *, current: bool = True
) -> Bias:
    """Match masks to the views of one launch; InputError names what does not broadcast."""
    found, kind, stride = [], "none", 0
    for view in views:
        array = masks.get(view.seq)
        found.append(array)
        if array is None:
            continue
        target = (spec.n_head, view.n_q, view.n_past + (view.n_q if current else 0))
        array = _checked(f"mask of sequence {view.seq}", array, target)
        kind = "bool" if array.dtype == np.bool_ and kind != "additive" else "additive"
        if array.ndim > 1:
            stride = max(stride, abs(array.strides[-2]) // array.itemsize)
    return Bias(tuple(found), kind, stride)


def _checked(name: str, array: Any, target: tuple[int, int, int]) -> Any:
    if not isinstance(array, np.ndarray):
        raise InputError(name, found=type(array).__name__, needed="a NumPy array")
    if array.dtype != np.bool_ and array.dtype.name not in _ADDITIVE:
        raise InputError(name, found=f"dtype {array.dtype}", needed="bool or a float to add")
    shape = (1,) * (3 - array.ndim) + array.shape
    if array.ndim > 3 or any(a not in (1, t) for a, t in zip(shape, target, strict=True)):
        raise InputError(
            name,
            found=f"shape {array.shape}",
            needed=f"broadcastable to (n_head, n_q, n_kv) {target}",
        )
    if array.dtype != np.bool_ and (np.isnan(array).any() or np.isposinf(array).any()):
        raise NonFiniteError(name, found="NaN or +inf", needed="finite values or -inf")
    return array


def check_sink_logits(spec: LayerSpec, sink_logits: Any) -> Any:
    """float32 [n_head], or None for a layer without them."""
    if spec.sink_logits != (sink_logits is not None):
        raise InputError(
            "sink_logits",
            found="given" if sink_logits is not None else "missing",
            needed=f"{'an array' if spec.sink_logits else 'nothing'}: the layer was planned with "
            f"sink_logits={spec.sink_logits}",
        )
    if sink_logits is None:
        return None
    array = np.asarray(sink_logits)
    if array.shape != (spec.n_head,) or array.dtype.kind != "f":
        raise InputError(
            "sink_logits", found=f"{array.dtype} {array.shape}", needed=f"float ({spec.n_head},)"
        )
    if not np.isfinite(array).all():
        raise NonFiniteError("sink_logits", found="NaN or infinity", needed="finite values")
    return np.ascontiguousarray(array, np.float32)


def check_query_moment(field: str, spec: LayerSpec, moment: Any) -> NDArray[np.float64]:
    """The sum of q q^T over un-rotated queries per KV head, float64 [n_kv_head, D, D]."""
    array = np.asarray(moment)
    shape = (spec.n_kv_head, spec.head_dim, spec.head_dim)
    if array.shape != shape or array.dtype.kind != "f":
        raise InputError(field, found=f"{array.dtype} {array.shape}", needed=f"floats {shape}")
    if not np.isfinite(array).all():
        raise NonFiniteError(field, found="NaN or infinity", needed="finite values")
    array = array.astype(np.float64)
    array = (array + array.swapaxes(1, 2)) / 2
    for head, m in enumerate(array):
        least, trace = np.linalg.eigvalsh(m)[0], np.trace(m)
        if least < -1e-3 * max(trace, 0) / len(m):
            raise InputError(
                field,
                found=f"eigenvalue {least:.3g} in KV head {head}",
                needed="a sum of q q^T, which has none below 0",
            )
    return np.ascontiguousarray(array)


def check_query_moments(
    layers: Sequence[LayerSpec], given: Sequence[Any] | None
) -> tuple[NDArray[np.float64] | None, ...]:
    """One moment or None per layer; () when none were given."""
    if given is None:
        return ()
    if len(given) != len(layers):
        raise InputError(
            "query_moments", found=f"{len(given)} entries", needed=f"one per layer: {len(layers)}"
        )
    found: list[NDArray[np.float64] | None] = []
    for index, (spec, moment) in enumerate(zip(layers, given, strict=True)):
        name = f"query_moments[{index}]"
        if moment is not None and spec.encoder != "aware":
            raise InputError(
                name,
                found=f"a moment for encoder={spec.encoder!r}",
                needed="None, or encoder='aware'",
            )
        found.append(None if moment is None else check_query_moment(name, spec, moment))
    return tuple(found)


class Given(NamedTuple):
    """An array a caller passed for ``field``, and what it must be."""

    field: str
    array: Any
    shape: tuple[int, ...]
    stored: Stored = Stored.NO


def check_rows(
    device: Device,
    given: Sequence[Given],
    *,
    where: str = "",
    place: Callable[[int], str] = lambda row: f"row {row}",
    later: list[Callable[[], None]] | None = None,
) -> tuple[Rows, ...]:
    """q, k, v [rows, heads, D] as the device takes them.

    Raises InputError (shape, dtype, device), NonFiniteError naming the first bad value; ``where``
    follows the field in messages, ``place`` says in words where a row of the array sits. Values are
    looked at now; a device with ``defer_unfit``, where looking would wait for it, leaves that to a
    function that is appended to ``later``.
    """
    rows = tuple(_on_device(device, g.field + where, g.array, g.shape) for g in given)
    arrays, stored = [r.array for r in rows], [g.stored for g in given]

    def refuse(found: tuple[int, tuple[int, ...]] | None) -> None:
        if found is None:
            return
        which, bad = found
        name = f"{given[which].field}{where}, {place(bad[0])}, head {bad[1]}, channel {bad[2]}"
        raise NonFiniteError(
            name,
            found=float(device.download(arrays[which])[bad]),
            needed="finite values that stay within fp16 (65504), also rotated where that is kept",
        )

    defer = getattr(device, "defer_unfit", None)
    if later is None or defer is None:
        refuse(device.first_unfit(arrays, stored))
    else:
        answer = defer(arrays, stored)
        later.append(lambda: refuse(answer()))
    return rows


def _on_device(device: Device, field: str, array: Any, shape: tuple[int, ...]) -> Rows:
    if getattr(array, "shape", ()) != shape and tuple(getattr(array, "shape", ())) != shape:
        found = getattr(array, "shape", type(array).__name__)
        raise InputError(field, found=f"shape {found}", needed=shape)
    return device.rows(field, array)


def check_group_table(seq: int, table: Any) -> NDArray[np.int32]:
    """Record slots of a sequence's groups, int32 [groups]; InputError when they are none."""
    slots = np.asarray(table)
    field = f"group_tables[{seq}]"
    if slots.ndim != 1 or (slots.size and slots.dtype.kind not in "iu"):
        raise InputError(field, found=f"{slots.dtype} {slots.shape}", needed="integers [groups]")
    if slots.size and slots.min() < 0:
        raise InputError(field, found=int(slots.min()), needed="slots >= 0")
    return slots.astype(np.int32)


def group_view(spec: LayerSpec, seq: int, table: Any, rows: int, at: int) -> SeqView:
    """A sequence of whole groups: ``rows`` queries, from row ``at`` of the step on, come after."""
    slots = check_group_table(seq, table)
    whole(f"n_q[{seq}]", rows)
    n_past = len(slots) * GROUP
    first = max(0, (n_past - spec.window + 1) // GROUP) if spec.window else 0
    body = (min(first, len(slots)), len(slots))
    return SeqView(seq, at, rows, n_past, slots, body, ())
