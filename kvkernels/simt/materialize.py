"""Entry ``materialize``: record slots as float32 rows."""

from __future__ import annotations

import numpy as np

from kvkernels.calls import MaterializeCall
from kvkernels.records.layout import GROUP
from kvkernels.simt.driver import Driver, scalar
from kvkernels.simt.program import Program

_ELEMENTS = 4096  # of one block of threads (``turn.inc``)


def program(dim: int) -> Program:
    """The kernel for that head_dim."""
    parts = ("common", "rotate", "turn", "lines", "materialize")
    return Program.of(parts, {"materialize": 128}, DIM=dim)


def materialize(driver: Driver, call: MaterializeCall) -> None:
    """Enqueue the decoding of record slots of every KV head, bit for bit ``reference.decode``."""
    layer, buffers = call.layer, call.buffers
    assert layer.k_bits is not None
    assert layer.v_bits is not None
    slots = np.ascontiguousarray(call.slots, np.int32)
    if not len(slots):
        return
    numbers = (len(slots), buffers.slots, layer.k_bits, layer.v_bits, int(call.rotated))
    args = (
        buffers.k_records, buffers.v_records, driver.upload(slots), call.k_out, call.v_out,
        *(scalar(n) for n in numbers),
    )  # fmt: skip
    parts = GROUP * layer.head_dim // _ELEMENTS
    grid = (len(slots) * parts, layer.n_kv_head, 2)
    driver.launch(program(layer.head_dim), "materialize", grid, args)
