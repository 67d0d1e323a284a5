"""Generated files say what the code says."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path

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


def test_the_decisions_keep_what_the_cases_promise() -> None:
    from kvkernels.testing.cases import by_id

    text = (ROOT / "dispatch" / "decisions.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows
    refused = {(r["device"], r["case"]) for r in rows if r["route"] == "refuse"}
    for row in rows:
        case = by_id(row["case"])
        if case.must_be == "refuse":
            assert (row["device"], case.id) in refused, row
        elif case.must_be == "native":
            assert row["route"] == "native", row
