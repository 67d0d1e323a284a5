"""What OpenCL devices must have: importable with no pyopencl, and the only place that says it."""

from __future__ import annotations

from kvkernels.capabilities import Capability, Requirement, fact_at_least, fact_one_of, within
from kvkernels.simt.table import simt_rows

DEVICE: tuple[Requirement, ...] = (
    fact_at_least("compiler", 1020, hint="a driver that compiles OpenCL C 1.2 or newer"),
    fact_one_of("address_bits", (64,)),
    # One buffer holds all records of a side, and drivers limit a buffer below the memory.
    within("max_offset", "max_alloc", hint="a smaller n_ctx, n_seq or fewer bits"),
)

TABLE: tuple[Capability, ...] = simt_rows("opencl", DEVICE)
