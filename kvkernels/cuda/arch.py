"""What an NVRTC can compile for a card: which architecture, and whether as machine code."""

from __future__ import annotations

#: (first NVRTC version with this list, compute capabilities it makes machine code for)
_KNOWN: tuple[tuple[int, tuple[int, ...]], ...] = (
    (11080, (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90)),
    (12080, (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 120)),
    (12090, (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 103, 120, 121)),
    (13000, (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)),
)


def known_to(nvrtc: int) -> tuple[int, ...]:
    """Compute capabilities that the NVRTC ``nvrtc`` (12040 for 12.4) knows; empty before 11.8."""
    return next((archs for since, archs in reversed(_KNOWN) if nvrtc >= since), ())


def target(compute_capability: int, nvrtc: int) -> str | None:
    """What to compile for a card: ``sm_61`` (machine code), ``compute_90`` (PTX for a driver that
    knows a card newer than the compiler), or None when this NVRTC dropped or never had it.
    """
    archs = known_to(nvrtc)
    if compute_capability in archs:
        return f"sm_{compute_capability}"
    older = [arch for arch in archs if arch < compute_capability]
    # The card must be newer than all that the compiler knows: 13.x knows nothing older than 7.0,
    # and a gap in its list is a card that it lacks, not one that it will learn.
    if older and compute_capability > archs[-1]:
        return f"compute_{older[-1]}"
    same_family = [arch for arch in older if arch // 10 == compute_capability // 10]
    return f"sm_{same_family[-1]}" if same_family else None
