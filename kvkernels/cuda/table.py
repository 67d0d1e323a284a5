"""What CUDA cards must have (V1): importable with no CuPy, and the only place that says it."""

from __future__ import annotations

from kvkernels.capabilities import (
    Capability,
    Requirement,
    fact_at_least,
    fact_at_most,
    fact_one_of,
    when,
)
from kvkernels.simt.table import mma_rows, simt_rows

#: compute capability from which CUDA 13 has compilers; below, only those of CUDA 12
TURING = 75
CUDA_13 = 13000

DEVICE: tuple[Requirement, ...] = (
    fact_at_least(
        "compute_capability", 50, hint="Kepler and older cards have no supported compiler"
    ),
    fact_at_least(
        "nvrtc",
        12000,
        hint="pip install 'kvkernels[cuda12]' or, from compute capability 7.5, 'kvkernels[cuda13]'",
    ),
    when(
        fact_at_most("compute_capability", TURING - 1),
        fact_at_most(
            "nvrtc",
            CUDA_13 - 1,
            hint="CUDA 13 dropped this card: uninstall cupy-cuda13x and install cupy-cuda12x, "
            "pip install 'kvkernels[cuda12]'",
        ),
    ),
    fact_one_of("lanes", (32,)),
)


def tensor_core(least: int) -> tuple[Requirement, ...]:
    """What a row with ``mma.sync`` asks besides: at least this compute capability."""
    return (*DEVICE, fact_at_least("compute_capability", least))


#: Rows of tensor-core kernels, preferred to the portable ones. A row is put here together with its
#: kernel, not before: what a table says must run.
MMA: tuple[Capability, ...] = mma_rows("cuda", tensor_core(TURING))

TABLE: tuple[Capability, ...] = simt_rows("cuda", DEVICE, before=MMA)
