"""One result per line: a table for people, JSON lines with a schema for programs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvkernels.bench.measure import Load
from kvkernels.bench.stats import verdict
from kvkernels.errors import InputError

SCHEMA = "kvk.bench/1"
OUTCOMES = ("ok", "miss", "info", "wrong")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured value. ``ratio`` is baseline / own time (above 1: own is quicker), the median
    of the rounds; ``ratio_of_minima`` is that of the best rounds, which a busy machine flatters
    less.

    ``value`` in ``unit`` is what ``target`` speaks about, when there is one. ``error`` is relative
    to the float64 reference, checked before anything is timed; ``outcome`` is ``wrong`` when that
    check failed, and then nothing was timed.
    """

    case: str
    device: str
    entry: str | None = None
    route: str | None = None
    median_s: float | None = None
    iqr_s: float | None = None
    min_s: float | None = None
    ratio: float | None = None
    ratio_of_minima: float | None = None
    baseline: str | None = None
    baseline_iqr_s: float | None = None
    baseline_min_s: float | None = None
    baseline_error: float | None = None
    error: float | None = None
    value: float | None = None
    unit: str = ""
    target: str = ""
    outcome: str = "info"
    note: str = ""

    def to_json(self, before: Load, after: Load) -> dict[str, Any]:
        """A JSON-ready dict with the schema id and the load of the machine around it."""
        load = {"before": before.to_json(), "after": after.to_json()}
        return {"schema": SCHEMA, **asdict(self), "load": load}


def shown(seconds: float | None) -> str:
    """Seconds as s, ms or us with three digits; ``-`` for none."""
    if seconds is None:
        return "-"
    for limit, factor, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "us")):
        if seconds >= limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def read_lines(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Results of an earlier ``--json`` run by (case, baseline); InputError for anything else."""
    found = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), found=str(error), needed="a file of JSON lines") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except ValueError:
            data = None
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise InputError(f"{path}:{number}", found=line[:60], needed=f"a {SCHEMA} object")
        found[data["case"], data["baseline"] or ""] = data
    return found


def compare(
    before: Mapping[tuple[str, str], Mapping[str, Any]],
    after: Mapping[tuple[str, str], Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """One line per timed case that both runs have: medians, after / before, and a verdict."""
    lines = []
    for key, a in before.items():
        b = after.get(key)
        if b is None or not a["median_s"] or not b["median_s"]:
            continue
        spread = (a["median_s"], a["iqr_s"] or 0.0), (b["median_s"], b["iqr_s"] or 0.0)
        lines.append(
            {
                "schema": "kvk.bench.compare/1",
                "case": key[0],
                "baseline": key[1] or None,
                "before_s": a["median_s"],
                "after_s": b["median_s"],
                "ratio": b["median_s"] / a["median_s"],
                "verdict": verdict(*spread),
            }
        )
    return lines


@dataclass(frozen=True, slots=True)
class Guards:
    """Least ratios by ``case vs baseline``: never a time, which belongs to one machine."""

    least: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Guards:
        """Read a TOML file with a ``[ratio]`` table; InputError names what is wrong."""
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InputError("guards", found=f"{path}: {error}", needed="a TOML file") from None
        ratios = data.get("ratio", {})
        good = isinstance(ratios, dict) and ratios
        if not good or not all(isinstance(v, int | float) for v in ratios.values()):
            raise InputError("guards", found=str(path), needed="a [ratio] table of numbers")
        return cls({str(k): float(v) for k, v in ratios.items()})

    def broken(self, results: Iterable[Result]) -> list[tuple[str, float, float]]:
        """(guard, least ratio, ratio found) of every guard that a result breaks."""
        found = []
        for r in results:
            name = f"{r.case} vs {r.baseline}"
            if r.ratio is not None and r.ratio < self.least.get(name, 0.0):
                found.append((name, self.least[name], r.ratio))
        return found

    def unmatched(self, results: Iterable[Result]) -> list[str]:
        """Guards for which nothing was measured: a guard that guards nothing is a mistake.

        A baseline that this machine does not have (no C compiler) has its line, and no ratio.
        """
        known = {f"{r.case} vs {r.baseline}" for r in results if r.ratio is not None or r.note}
        return sorted(self.least.keys() - known)
