"""What AMD cards must have (V2): importable with no ROCm, and the only place that says it."""

from __future__ import annotations

from kvkernels.capabilities import (
    UNKNOWN,
    Capability,
    DeviceCaps,
    Requirement,
    fact_one_of,
)
from kvkernels.hip.families import FAMILIES, GFX
from kvkernels.op import AttentionOp
from kvkernels.simt.table import simt_rows


def _compiler_knows(_: AttentionOp, caps: DeviceCaps) -> str | None:
    number, have = caps.facts.get("gfx"), caps.facts.get("hiprtc")
    known = GFX.get(str(number))
    if known is None or not isinstance(have, int):
        return f"{UNKNOWN}: {number} with hiprtc {have}"
    return None if have >= known.least_hiprtc else f"{number} needs {known.least_hiprtc} > {have}"


DEVICE: tuple[Requirement, ...] = (
    fact_one_of(
        "family",
        FAMILIES,
        hint="this gfx number is in no list of ours (kvkernels/hip/families.py), and no other "
        "card's layout is taken for it",
    ),
    fact_one_of("lanes", (32, 64)),
    Requirement(
        "device.hiprtc",
        "a hiprtc that compiles for this gfx number",
        _compiler_knows,
        "install a newer ROCm",
    ),
)

TABLE: tuple[Capability, ...] = simt_rows("hip", DEVICE)
