"""One call against baselines: each result checked, then all of them timed in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from kvkernels.bench.measure import Effort, measure
from kvkernels.bench.report import Result
from kvkernels.bench.stats import paired_ratio
from kvkernels.bench.workload import F64, relative_error

OWN = "own"
TOLERANCE = 1e-4  # relative RMS against float64; float32 sums stay far below
# Integer activations (codec.md 5c) round once more. White random values are their worst case:
# attention averages them away and the rounding stays. At 4 bits the codec itself loses 10 %.
AUTO_TOLERANCE = 3e-2


@dataclass(frozen=True, slots=True)
class Checked:
    """A call, what it must compute, and how far from that it may be (relative RMS); ``least``: the
    ratio to it that is asked of our own.
    """

    call: Callable[[], NDArray[Any]]
    expected: F64
    limit: float
    least: float = 1.0


def against(base: Result, calls: Mapping[str, Checked], effort: Effort) -> Iterator[Result]:
    """One line per baseline: everything in ``calls`` but ``own``. The first call that is off gives
    one line that says so, and nothing is timed.
    """
    for name, asked in calls.items():
        gap = relative_error(asked.call().reshape(asked.expected.shape), asked.expected)
        if not gap <= asked.limit:
            note = f"{name} is off by {gap:.2e}, limit {asked.limit:g}; not timed"
            yield replace(base, outcome="wrong", error=gap, note=note)
            return
        if name == OWN:
            base = replace(base, error=gap)
    samples = measure({name: asked.call for name, asked in calls.items()}, effort)
    own = samples.pop(OWN)
    for name, sample in samples.items():
        ratio = paired_ratio(sample.seconds, own.seconds)
        yield replace(
            base,
            median_s=own.median_s,
            iqr_s=own.iqr_s,
            min_s=own.min_s,
            baseline=name,
            ratio=ratio,
            ratio_of_minima=sample.min_s / own.min_s,
            value=sample.median_s,
            unit="s (baseline)",
            outcome="ok" if ratio >= calls[name].least else "miss",
        )
