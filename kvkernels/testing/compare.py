"""How far a result is from the float64 model, and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

Limits = tuple[float, float]
# Relative RMS error and largest error, both relative to the RMS of the expected values. Measured
# over all cases: float32 2.0e-6 and 2.0e-5 (scores of hundreds), int16 5.6e-5 and 2.5e-3, int8
# 5.4e-3 and 4.3e-2 (one sharp weight on the step of a block).
FLOAT32: Limits = (1e-5, 1e-4)
INT16: Limits = (2e-4, 5e-3)
INT8: Limits = (1e-2, 1e-1)
# Entries whose results are the same whatever the activations of a plan are, and their limits.
FIXED: dict[str, Limits] = {
    "*/attend_materialized": FLOAT32,
    "*/attend_portable": FLOAT32,
    "*/attend_prefill_portable": FLOAT32,
    "*_mma": INT16,
}


def fixed(entry: str) -> Limits | None:
    """The limits of an entry that takes no notice of ``activations``, None for others."""
    return next((limits for name, limits in FIXED.items() if fnmatchcase(entry, name)), None)


def limits_of(entry: str, activations: str, v_bits: int) -> Limits:
    """What an entry is held to with these activations (codec.md 5c)."""
    if (same := fixed(entry)) is not None:
        return same
    if activations == "f32":
        return FLOAT32
    if activations == "int8" or (activations == "auto" and v_bits <= 4):
        return INT8
    return INT16


@dataclass(frozen=True, slots=True)
class Comparison:
    """Errors relative to the RMS of the expected values, and the limits they are held to."""

    rms: float
    worst: float
    finite: bool
    limit_rms: float
    limit_worst: float

    @property
    def ok(self) -> bool:
        """Finite, and within both limits."""
        return self.finite and self.rms <= self.limit_rms and self.worst <= self.limit_worst

    def to_json(self) -> dict[str, Any]:
        """Numbers by name; JSON has no NaN, so a result that is not finite has null errors."""
        return {
            "rms": self.rms if self.finite else None,
            "worst": self.worst if self.finite else None,
            "finite": self.finite,
            "limit_rms": self.limit_rms,
            "limit_worst": self.limit_worst,
        }


def compare(actual: NDArray[Any], expected: NDArray[Any], limits: Limits = FLOAT32) -> Comparison:
    """Compare with the expected values; where all of them are 0, anything else is infinitely
    wrong.
    """
    limit_rms, limit_worst = limits
    if not np.isfinite(actual).all():
        return Comparison(np.inf, np.inf, False, limit_rms, limit_worst)
    error = np.abs(actual.astype(np.float64) - expected)
    scale = float(np.sqrt(np.mean(np.square(expected, dtype=np.float64))))
    if scale == 0:
        wrong = np.inf if error.any() else 0.0
        return Comparison(wrong, wrong, True, limit_rms, limit_worst)
    rms = float(np.sqrt(np.mean(error**2))) / scale
    return Comparison(rms, float(error.max()) / scale, True, limit_rms, limit_worst)


def exact_zeros(actual: NDArray[Any], expected: NDArray[Any]) -> bool:
    """Rows that the model leaves at exactly 0 (nothing visible, B3) are exactly 0 in the result."""
    empty = ~expected.any(axis=-1)
    return not actual[empty].any()
