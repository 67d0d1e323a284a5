"""How far a result is from the float64 model, and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Relative RMS error and largest error (relative to the RMS of the expected values) of an entry that
# computes in float32, measured over all cases and rounded up; an entry that rounds more names its
# own limits.
FLOAT32 = (1e-5, 1e-4)
LIMITS: dict[str, tuple[float, float]] = {}


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


def compare(actual: NDArray[Any], expected: NDArray[Any], entry: str = "") -> Comparison:
    """Compare with the expected values; where all of them are 0, anything else is infinitely
    wrong.
    """
    limit_rms, limit_worst = LIMITS.get(entry, FLOAT32)
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
