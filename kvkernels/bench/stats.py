"""Order statistics of timings, and when a difference counts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FACTOR = 1.1
"""A change below this factor is noise on a shared machine."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds per call, one value per round."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The middle round."""
        return statistics.median(self.seconds)

    @property
    def iqr_s(self) -> float:
        """Distance between the quartiles; 0 for a single round."""
        if len(self.seconds) < 2:
            return 0.0
        quarter, _, three = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return three - quarter

    @property
    def min_s(self) -> float:
        """The quickest round."""
        return min(self.seconds)


def paired_ratio(baseline: Sequence[float], own: Sequence[float]) -> float:
    """Median over rounds of baseline / own: above 1 means that own is quicker.

    Both were timed in the same round, so a machine that slows down slows down both. When one was
    timed in the first rounds only, those count.
    """
    return statistics.median(b / o for b, o in zip(baseline, own, strict=False))


def verdict(before: tuple[float, float], after: tuple[float, float]) -> str:
    """``faster``, ``slower`` or ``~`` for two (median, IQR) pairs in seconds.

    Counts only when the medians differ by ``FACTOR`` and the boxes around them do not overlap.
    """
    (a, spread_a), (b, spread_b) = before, after
    apart = abs(a - b) > (spread_a + spread_b) / 2
    if not apart or max(a, b) < FACTOR * min(a, b):
        return "~"
    return "faster" if b < a else "slower"
