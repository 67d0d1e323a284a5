"""Sealed groups as an engine holds them: bytes, what they mean, and the layout they are in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvkernels.errors import InputError
from kvkernels.op import LayerSpec
from kvkernels.records.layout import LINE, STREAM, HeadLayout, Side
from kvkernels.records.packing import line_to_stream, stream_to_line

Bytes = NDArray[np.uint8]


class Memory(Protocol):
    """What records need of a device: ``kvkernels.backend.Device`` is one."""

    @property
    def caps(self) -> Any:
        """With the device's ``id``."""

    def upload(self, host: Any) -> Any:
        """An array on the device."""

    def download(self, array: Any) -> Any:
        """A NumPy array."""


@dataclass(frozen=True, slots=True)
class Records:
    """Sealed groups of one layer. k, v: uint8 [n_kv_head, n_groups, head bytes], C-contiguous.

    ``layout``: "line" (what kernels read) or "stream" (files, exchange). The layout travels with
    the bytes, so that a reader of one never takes the other. ``device``: the id of the device whose
    arrays k and v are, None when they are NumPy arrays; see ``on`` and ``to_host``.
    """

    spec: LayerSpec
    k: Any
    v: Any
    layout: str = LINE
    device: str | None = None

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

    def on(self, device: Memory) -> Records:
        """The same records in the memory of a device, where its attention reads them: copied once,
        or these themselves when they are there already (on the CPU always). Raises InputError for
        records of another device, MemoryError.
        """
        if self.device == device.caps.id:
            return self
        if self.device is not None:
            raise InputError(
                "records", found=f"records on {self.device}", needed="records in host memory",
                hint="Use to_host with the device they are on",
            )  # fmt: skip
        k, v = device.upload(self.k), device.upload(self.v)
        here = k is self.k  # the device computes on NumPy arrays
        return Records(self.spec, k, v, self.layout, None if here else device.caps.id)

    def to_host(self, device: Memory) -> Records:
        """The same records as NumPy arrays, copied from the device they are on."""
        if self.device is None:
            return self
        if self.device != device.caps.id:
            raise InputError("device", found=device.caps.id, needed=self.device)
        return Records(self.spec, device.download(self.k), device.download(self.v), self.layout)

    def to_layout(self, layout: str) -> Records:
        """The same records in another layout: a pure permutation of bytes."""
        if layout == self.layout:
            return self
        if self.device is not None:
            raise InputError(
                "records", found=f"records on {self.device}", needed="records in host memory",
                hint="Use to_host(device) first",
            )  # fmt: skip
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
