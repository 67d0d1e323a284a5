"""Sealed groups as an engine holds them: bytes, what they mean, and the layout they are in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvkernels.errors import InputError
from kvkernels.op import LayerSpec
from kvkernels.records.layout import LINE, STREAM, HeadLayout, Side
from kvkernels.records.packing import line_to_stream, stream_to_line

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Records:
    """Sealed groups of one layer. k, v: uint8 [n_kv_head, n_groups, head bytes], C-contiguous.

    ``layout``: "line" (what kernels read) or "stream" (files, exchange). The layout travels with
    the bytes, so that a reader of one never takes the other.
    """

    spec: LayerSpec
    k: Bytes
    v: Bytes
    layout: str = LINE

    def __post_init__(self) -> None:
        if self.layout not in (LINE, STREAM):
            raise InputError("layout", found=repr(self.layout), needed=f"{LINE!r} or {STREAM!r}")
        for name, array, layout in (
            ("k", self.k, head_layout(self.spec, Side.K)),
            ("v", self.v, head_layout(self.spec, Side.V)),
        ):
            shape = (self.spec.n_kv_head, self.n_groups, layout.nbytes)
            ok = array.dtype == np.uint8 and array.shape == shape and array.flags.c_contiguous
            if not ok:
                raise InputError(
                    f"records.{name}",
                    found=f"{array.dtype} {array.shape}",
                    needed=f"C-contiguous uint8 {shape} (n_kv_head, groups, head bytes)",
                )

    @property
    def n_groups(self) -> int:
        """Sealed groups of 128 tokens."""
        return int(self.k.shape[1]) if self.k.ndim == 3 else 0

    @property
    def nbytes(self) -> int:
        """Bytes of both sides."""
        return int(self.k.nbytes + self.v.nbytes)

    def to_layout(self, layout: str) -> Records:
        """The same records in another layout: a pure permutation of bytes."""
        if layout == self.layout:
            return self
        change = line_to_stream if layout == STREAM else stream_to_line
        if layout not in (LINE, STREAM):
            raise InputError("layout", found=repr(layout), needed=f"{LINE!r} or {STREAM!r}")

        def one(array: Bytes, side: Side) -> Bytes:
            record = head_layout(self.spec, side).record
            return np.ascontiguousarray(
                change(array.reshape(-1, record.nbytes), record).reshape(array.shape)
            )

        return Records(self.spec, one(self.k, Side.K), one(self.v, Side.V), layout)


def head_layout(spec: LayerSpec, side: Side) -> HeadLayout:
    """Layout of one KV head of a layer's side; InputError when it is not KVarN."""
    bits = spec.k_bits if side is Side.K else spec.v_bits
    if bits is None:
        raise InputError("spec", found=f"{spec.k}/{spec.v}", needed="KVarN types on both sides")
    return HeadLayout(side, bits, spec.head_dim)
