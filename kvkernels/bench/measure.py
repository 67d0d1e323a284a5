"""Timing: calibrated loops, warm-up, interleaved rounds, and how busy the machine was."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvkernels.bench.stats import Sample

Call = Callable[[], object]
_DEFAULT_L3 = 32 << 20


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure: ``rounds`` of loops that take ``least_s`` seconds or more each."""

    rounds: int = 15
    least_s: float = 0.01
    warmup: int = 2
    cold: bool = False
    rest_s: float = 0.0  # pause before every timing, in which threads that spin go to sleep
    long_s: float = float("inf")  # a cold call that takes longer is timed in a third of the rounds


QUICK = Effort(rounds=5, least_s=0.002, warmup=1)


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the machine was: run queue, and a fixed loop's median time over its best."""

    load1: float
    spin: float

    def to_json(self) -> dict[str, float]:
        """A JSON-ready dict."""
        return asdict(self)


def _spin() -> float:
    start = time.perf_counter()
    total = 0
    for i in range(20_000):
        total += i
    return time.perf_counter() - start


def machine_load(n: int = 15) -> Load:
    """Load now. ``spin`` near 1 is a quiet machine; above 1.2, look for another time to measure."""
    taken = sorted(_spin() for _ in range(n))
    load1 = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return Load(round(load1, 2), round(taken[n // 2] / taken[0], 3))


def l3_bytes() -> int:
    """Bytes of the last-level cache; 32 MiB when nothing says."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text(encoding="ascii").strip()
            sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
        except (OSError, ValueError):
            continue
    return max(sizes, default=_DEFAULT_L3)


class ColdCache:
    """Reads more than the last-level cache holds, so that the next call finds it empty of ours."""

    def __init__(self) -> None:
        self._buffer = np.ones(3 * l3_bytes() // 8)

    def flush(self) -> None:
        """Read the whole buffer."""
        self._buffer.sum()


def _loops(call: Call, least_s: float) -> int:
    """Calls per round so that a round takes ``least_s``, far above the timer's own step."""
    loops = 1
    while True:
        start = time.perf_counter()
        for _ in range(loops):
            call()
        taken = time.perf_counter() - start
        if taken >= least_s or loops >= 1 << 20:
            return loops
        loops = max(loops + 1, min(loops * 16, int(loops * 1.2 * least_s / max(taken, 1e-9))))


def _warm(call: Call, times: int) -> float:
    taken = 0.0
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken = time.perf_counter() - start
    return taken


def measure(calls: Mapping[str, Call], effort: Effort | None = None) -> dict[str, Sample]:
    """Time several callables in interleaved rounds, each round beginning with another of them.

    Interleaved, because what the machine does in one second should not count against one of them.
    With ``cold`` every call is timed alone after the caches were emptied.
    """
    effort = effort or Effort()
    takes = {name: _warm(call, effort.warmup) for name, call in calls.items()}
    cache = ColdCache() if effort.cold else None
    loops = {n: 1 if cache else _loops(call, effort.least_s) for n, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    few = max(3, effort.rounds // 3)
    for turn in range(effort.rounds):
        for name in order:
            call, count = calls[name], range(loops[name])
            if cache and turn >= few and takes[name] > effort.long_s:
                continue
            if effort.rest_s:
                time.sleep(effort.rest_s)
            if cache:
                cache.flush()
            start = time.perf_counter()
            for _ in count:
                call()
            seconds[name].append((time.perf_counter() - start) / len(count))
        order.append(order.pop(0))
    return {name: Sample(tuple(values)) for name, values in seconds.items()}
