"""AMD's gfx numbers as data: what is not listed is unknown, and never treated as a relative (V2).

``least_hiprtc`` is the oldest HIP whose compiler is known to take the number (5050 is ROCm 5.5);
one that does not know it may end the process instead of reporting an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Gfx:
    """A known gfx number: family, lanes of a wave as our kernels are compiled, compiler needed."""

    family: str
    lanes: int
    least_hiprtc: int


_LINES: tuple[tuple[str, int, int, str], ...] = (
    ("gcn5", 64, 5000, "gfx900 gfx902 gfx904 gfx906 gfx909 gfx90c"),
    ("cdna1", 64, 5000, "gfx908"),
    ("cdna2", 64, 5000, "gfx90a"),
    ("cdna3", 64, 6000, "gfx942"),
    ("cdna4", 64, 7000, "gfx950"),
    ("rdna1", 32, 5000, "gfx1010 gfx1011 gfx1012 gfx1013"),
    ("rdna2", 32, 5000, "gfx1030 gfx1031 gfx1032 gfx1033 gfx1034 gfx1035 gfx1036"),
    ("rdna3", 32, 5050, "gfx1100 gfx1101 gfx1102 gfx1103"),
    ("rdna3.5", 32, 6030, "gfx1150 gfx1151"),
    ("rdna3.5", 32, 6040, "gfx1152 gfx1153"),
    ("rdna4", 32, 6030, "gfx1200 gfx1201"),
)
GFX: Mapping[str, Gfx] = MappingProxyType(
    {
        number: Gfx(family, lanes, least)
        for family, lanes, least, numbers in _LINES
        for number in numbers.split()
    }
)
FAMILIES = tuple(dict.fromkeys(line[0] for line in _LINES))
_NUMBER = re.compile(r"(gfx[1-9][0-9]{0,1}[0-9a-f]{2})(:[a-z0-9]+[+-])*")


def gfx_number(arch: str) -> str | None:
    """``gfx90a`` of ``gfx90a:sramecc+:xnack-``; None when ``arch`` is no such text."""
    match = _NUMBER.fullmatch(arch)
    return match[1] if match else None


def lookup(arch: str | None) -> Gfx | None:
    """The family of an architecture name as HIP gives it; None when it is unknown."""
    return GFX.get(gfx_number(arch) or "") if arch else None
