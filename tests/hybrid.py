"""A SIMT device whose cache is filled by the CPU's kernels: attention alone is the device's.

For parity cases of a driver: what is stored is right, so what comes out judges the driver.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvkernels.backend import Rows
from kvkernels.calls import AttendCall, LayerBuffers
from kvkernels.registry import open_device

#: of every source of keys, decode and prefill
CASES = (
    "decode/k4v4/d64/h4x2/kv300/q1",
    "decode/k3v5/d128/h4x2/kv300/q3",
    "prefill/k4v4/d64/h4x2/kv330/q17",
    "batch/k4v4/d64/h4x2/kv300+129+700/q1+17+3",
    "dtype/k4v4/d128/h4x2/kv300/q3/float16",
    "mask/k4v4/d64/h4x2/kv498/q3/bool-keys",
    "standard/q8_0-q4_0/d64/h4x2/kv257/q1/length",
    "tail/k5v4/d64/h4x2/kv300+129+700/q1+17+3/tail256",
    "logits/k4v4/d128/h4x2/kv300/q3/sink-logits",
)
_BUFFERS = ("k_records", "v_records", "k_exact", "v_exact", "k_ring", "v_ring")


class Hybrid:
    """``simt``: an opened SimtDevice. Arrays are NumPy's; each attend uploads and downloads."""

    def __init__(self, simt: Any) -> None:
        self.simt, self.cpu = simt, open_device("cpu:0")
        self.caps, self.table = simt.caps, simt.table
        self.scratch = simt.scratch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cpu, name)

    def rows(self, field: str, array: Any) -> Rows:
        """Checked by the CPU, kept with the dtype it has."""
        return Rows(array, self.cpu.rows(field, array).dtype)

    def workspace_bytes(self, layers: Any, steps: Any) -> int:
        """As the SIMT device says."""
        return int(self.simt.workspace_bytes(layers, steps))

    def first_unfit(self, arrays: Any, stored: Any) -> Any:
        """By the CPU."""
        return self.cpu.first_unfit([self._f32(array) for array in arrays], stored)

    def _f32(self, array: Any) -> Any:
        return None if array is None else self.cpu.rows("rows", array).array

    def run(self, entry: str, op: Any, call: Any) -> None:
        """Attention by the SIMT device, everything else by the CPU's entry of the same name."""
        if not isinstance(call, AttendCall):
            rows = {f.name: getattr(call, f.name) for f in dataclasses.fields(call)}
            changed = {n: self._f32(rows[n]) for n in "qkv" if n in rows}
            self.cpu.run("cpu/" + entry.partition("/")[2], op, dataclasses.replace(call, **changed))
            return
        put, driver = self._put, self.simt.driver
        buffers: LayerBuffers = dataclasses.replace(
            call.buffers, prepared={}, **{n: put(getattr(call.buffers, n)) for n in _BUFFERS}
        )
        out = put(call.out)
        lse = put(call.lse)
        self.simt.run(
            entry, op,
            dataclasses.replace(
                call, buffers=buffers, q=self._seen("q", call.q), k=self._seen("k", call.k),
                v=self._seen("v", call.v), out=out, lse=lse,
            ),
        )  # fmt: skip
        self.simt.synchronize()
        call.out[...] = driver.download(out)
        call.lse[...] = driver.download(lse)

    def _put(self, array: Any) -> Any:
        return None if array is None else self.simt.upload(np.ascontiguousarray(array))

    def _seen(self, field: str, array: Any) -> Any:
        return None if array is None else self.simt.rows(field, self._put(array)).array

    def synchronize(self) -> None:
        """Both."""
        self.simt.synchronize()
        self.cpu.synchronize()
