"""What this CPU is: read here, used in the table and the kernels."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from kvkernels.capabilities import DeviceCaps, Fact, Feature
from kvkernels.cpu.features import best
from kvkernels.cpu.pool import available_threads
from kvkernels.cpu.table import TABLE

# /proc/cpuinfo name -> ours
_FLAGS = {
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512_vnni": "avx512_vnni",
    "avx_vnni": "avx_vnni",
    "asimddp": "dotprod",
}


def _cpuinfo() -> tuple[str, frozenset[str] | None]:
    name, flags = platform.processor() or platform.machine(), None
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            for line in f:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    name = value.strip()
                elif key.strip() in ("flags", "Features") and flags is None:
                    flags = frozenset(value.split())
    except OSError:
        pass
    return name, flags


def _features(flags: frozenset[str] | None) -> dict[str, Feature]:
    if flags is None:
        return {ours: Feature(None, None, "no /proc/cpuinfo") for ours in _FLAGS.values()}
    return {ours: Feature(theirs in flags, theirs in flags) for theirs, ours in _FLAGS.items()}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def probe_cpu(isa: str | None = None) -> DeviceCaps:
    """The one CPU device, ``cpu:0``, using ``isa`` (None: the best it has)."""
    name, flags = _cpuinfo()
    features = _features(flags)
    facts: dict[str, Fact] = {
        "arch": platform.machine(),
        "isa": isa or best(features),
        "n_threads": available_threads(),
        "numba": _version("numba"),
        "numpy": _version("numpy"),
    }
    return DeviceCaps(
        id="cpu:0",
        backend="cpu",
        name=name,
        driver=f"numba {_version('numba')}",
        facts=facts,
        features=features,
        # Every entry is run against the float64 reference by the suite and by `kvk parity` on any
        # machine.
        qualified={row.entry: "local" for row in TABLE},
    )
