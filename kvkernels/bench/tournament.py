"""``kvk bench --peers``: one process per number of threads, their lines, and what is required."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvkernels.bench.contest import OWN, PREFILL, STANDARD, TAIL, Plan
from kvkernels.bench.report import SCHEMA
from kvkernels.errors import InputError

Line = dict[str, Any]
Lines = Sequence[Line]
_THREAD_SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
C_ROWS = ("c-avx512-vnni-i16", "c-avx2-i16")


def measured(plan: Plan) -> list[Line]:
    """Everything of one number of threads, measured in a fresh process; its lines."""
    env = dict(os.environ) | dict.fromkeys(_THREAD_SETTINGS, str(plan.threads))
    command = [sys.executable, "-m", "kvkernels.bench.contest", json.dumps(asdict(plan))]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise InputError(
            "bench --peers", found=f"exit status {done.returncode}", needed="a run that ends well"
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


def read(text: str) -> list[Line]:
    """Lines of an earlier ``--json`` run; InputError for anything else."""
    try:
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise InputError("--from", found=str(error), needed="JSON lines") from None
    if not all(isinstance(x, dict) and x.get("schema") == SCHEMA for x in lines):
        raise InputError("--from", found="other lines", needed=f"{SCHEMA} objects")
    return [x for x in lines if not x["case"].startswith("floor/")]


@dataclass(frozen=True, slots=True)
class Floor:
    """A required number: ``kind`` of the first of ``rows`` that was measured in ``case``.

    ratio: row's time / ours, or / that of the first of ``over``; inverse: ours / row's time; value:
    seconds; error: relative.
    """

    text: str
    case: str
    rows: tuple[str, ...]
    kind: str
    least: float | None = None
    most: float | None = None
    over: tuple[str, ...] = ()

    def check(self, found: Mapping[tuple[str, str], Line]) -> Line:
        """One line: ok, miss, or info when it was not measured."""
        sign, limit = (">=", self.least) if self.most is None else ("<=", self.most)
        made = {
            "schema": SCHEMA,
            "case": f"floor/{self.case.removeprefix('peers/')}",
            "baseline": self.rows[0],
            "target": f"{self.text} {sign} {limit:g}",
            "value": None,
            "by_minima": None,
            "outcome": "info",
            "note": "not measured",
        }
        line, other = self._first(found, self.rows), self._first(found, self.over)
        if line is None or (self.over and other is None):
            lost = found.get((self.case, (self.over if line else self.rows)[0]), {})
            return made | {"note": lost.get("note") or "not measured"}
        value, best = self._of(line), self._of(line, "ratio_of_minima")
        assert value is not None
        if other is not None:
            value /= other["ratio"]
            best = best / other["ratio_of_minima"] if best else None
        return made | {
            "baseline": line["baseline"],
            "value": value,
            "by_minima": best if self.kind in ("ratio", "inverse") else None,
            "outcome": "ok" if self._holds(value) else "miss",
            "note": ""
            if best is None or self._holds(best) == self._holds(value)
            else f"best rounds say {'ok' if self._holds(best) else 'miss'}",
        }

    def _first(self, found: Mapping[tuple[str, str], Line], rows: tuple[str, ...]) -> Line | None:
        lines = (found.get((self.case, row)) for row in rows)
        return next((x for x in lines if x and self._of(x)), None)

    def _of(self, line: Line, ratio: str = "ratio") -> float | None:
        number = {
            "ratio": line.get(ratio),
            "inverse": line.get(ratio) and 1 / line[ratio],
            "value": line.get("value"),
            "error": line.get("baseline_error"),
        }[self.kind]
        return None if number is None else float(number)

    def _holds(self, value: float) -> bool:
        return value >= self.least if self.least is not None else value <= (self.most or 0.0)


def floors(lines: Iterable[Line]) -> list[Line]:
    """The numbers that the project requires, each with ok or miss."""
    found = {(x["case"], x["baseline"] or ""): x for x in lines}
    threads = sorted({int(c.rpartition("-t")[2]) for c, _ in found if c.startswith("peers/")})
    decodes = [c for c, _ in found if c.startswith("peers/decode-n")]
    sizes = sorted({int(c.split("-n")[1].split("-")[0]) for c in decodes})
    checks = [x for t in threads for n in sizes for x in _decode_floors(n, t)]
    for t in threads:
        case = "peers/prefill-q{}-n{}-t{}".format(*PREFILL, t)
        text = "torch f32 folded / ours"
        checks.append(Floor(text, case, ("torch-f32-folded",), "ratio", least=1.5))
    for side in "kv":
        text, case = f"published encoder, {side} tile, s", f"peers/encode-tile-{side}-t1"
        checks.append(Floor(text, case, ("published",), "value", most=100e-6))
    return [x.check(found) for x in checks]


def _decode_floors(n: int, t: int) -> list[Floor]:
    case = f"peers/decode-n{n}-t{t}"
    made = [
        Floor("ours / C with intrinsics", case, C_ROWS, "inverse", most=1.2),
        Floor("our launch / C", case, (f"{OWN}-launch",), "ratio", most=1.2, over=C_ROWS),
        Floor("error, int16", case, (f"{OWN}-int16",), "error", most=5e-4),
        Floor("error, int8 PV", case, (OWN,), "error", most=1.5e-2),
    ]
    if n == 4096:
        bf16, quantised = 4.0, 25.0
        made += [
            Floor(f"k{b}v{b} / k4v4", case, (f"kvk-k{b}v{b}",), "ratio", most=1.6)
            for b in (2, 3, 5, 6, 8)
        ]
        made += [
            Floor("GQA 4 / GQA 1", case, (f"{OWN}-gqa1",), "inverse", most=1.3),
            Floor("4 queries / 1 query", case, (f"{OWN}-4-queries",), "ratio", most=2.5),
        ]
    elif n == 32768:
        bf16, quantised = 6.0, 100.0
        made.append(Floor("read of the F16 cache / ours", case, ("read-f16",), "ratio", least=1.0))
        folded, tail = ("torch-bf16-folded",), f"{OWN}-tail{TAIL}"
        made += [
            Floor(f"{folded[0]} / {row}", case, folded, "ratio", least=3.0, over=(row,))
            for row in (f"kvk-{kind}" for kind in STANDARD)
        ]
        made.append(Floor(f"{tail} / {OWN}", case, (tail,), "ratio", most=1.15))
        if t > 1:
            text = f"1 thread / {t} threads"
            made.append(Floor(text, case, (f"{OWN}-1-thread",), "ratio", least=1.7))
    else:
        return made
    for row, least in (
        ("torch-bf16-folded", bf16),
        ("hf-quanto-4bit", quantised),
        ("hf-hqq-4bit", quantised),
    ):
        made.append(Floor(f"{row} / ours", case, (row,), "ratio", least=least))
    return made


def wrong(lines: Iterable[Line]) -> list[Line]:
    """Rows that did not compute what the reference does."""
    return [x for x in lines if x["outcome"] == "wrong"]
