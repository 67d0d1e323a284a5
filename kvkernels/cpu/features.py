"""Which instruction set the kernels use: the best one the CPU has,
or the one asked for if it has it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvkernels.capabilities import Feature

#: name -> features it needs, best first (the emitters are in ``kernels/isa.py``)
ISAS: dict[str, tuple[str, ...]] = {
    "avx512_vnni": ("avx512f", "avx512bw", "avx512_vnni"),
    "avx_vnni": ("avx2", "avx_vnni"),
    "avx2": ("avx2",),
    "neon_dot": ("dotprod",),
    "generic": (),
}


def missing(isa: str, features: Mapping[str, Feature]) -> list[str]:
    """Features that ``isa`` needs and the CPU does not have enabled."""
    return [name for name in ISAS[isa] if features.get(name, Feature()).enabled is not True]


def best(features: Mapping[str, Feature]) -> str:
    """The first instruction set whose features are all there; ``generic`` always is."""
    return next(isa for isa in ISAS if not missing(isa, features))
