"""Generated files say what the code says."""

from __future__ import annotations

import csv
import importlib.util
import io
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def test_nothing_is_stale() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "regen.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def regen() -> ModuleType:
    spec = importlib.util.spec_from_file_location("regen", ROOT / "tools" / "regen.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Device files that no entry, or not every one, can serve: why, by the id of the reason.
LACKING = {
    "cuda-k80-sm37": "device.compute_capability",
    "hip-unknown-gfx1310": "device.family",
    "opencl-gpu-no-fp64": "device.fp64",
}


def test_the_decisions_keep_what_the_cases_promise(regen: ModuleType) -> None:
    known = regen.tables()
    seen = set()
    for stem, caps in regen.devices(known).items():
        outcome = defaultdict(list)
        for case, _, made in regen.decisions(known, caps):
            outcome[case].append(made)
        for case, made in outcome.items():
            refused = [d for d in made if not d.ok]
            lacks = [
                d
                for d in refused
                if any(r.id == LACKING.get(stem) for row in d.considered for r in row.reasons)
            ]
            seen |= {stem} if lacks else set()
            if case.must_be == "refuse":
                assert refused, (stem, case.id)
            elif case.must_be == "native":
                assert refused == lacks, (stem, case.id)
                assert all(d.route == "native" for d in made if d.ok), (stem, case.id)
    assert seen == set(LACKING)


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def test_the_distinct_decisions_are_those_of_every_case(regen: ModuleType) -> None:
    (stem,) = regen.EVERY_CASE
    folder = ROOT / "dispatch"
    groups = defaultdict(list)
    for row in rows(folder / "cases" / f"{stem}.csv"):
        groups[tuple(row[name] for name in regen.ANSWER)].append(row["case"])
    found = rows(folder / "decisions" / f"{stem}.csv")
    assert len(found) == len(groups) > 20
    for row in found:
        ids = groups[tuple(row[name] for name in regen.ANSWER)]
        assert int(row["cases"]) == len(ids)
        assert row["first"].split() == ids[:3]
        assert row["digest"] == regen.digest(ids)
    assert regen.digest(["b", "a"]) == regen.digest(["a", "b"]) != regen.digest(["a", "c"])


def test_the_recorded_decisions_stay_small() -> None:
    assert sum(path.stat().st_size for path in (ROOT / "dispatch").rglob("*")) < 1_000_000


def test_a_file_that_nothing_generates_is_stale(regen: ModuleType) -> None:
    assert regen.left_over(regen.generated()) == []
    assert regen.left_over([]) != []
