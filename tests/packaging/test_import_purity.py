"""Importing the package loads the standard library only, and is quick."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_MS = 100
PURE = ("op", "capabilities", "errors", "settings", "dispatch", "request", "backend", "registry")

LIST_THIRD_PARTY = """
import sys
before = set(sys.modules)
import {module}
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(",".join(sorted(new - set(sys.stdlib_module_names) - {{"kvkernels"}})))
"""


def python(*args: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        check=True,
        env=env,
        cwd=ROOT,
        timeout=60,
    )


def third_party(module: str) -> str:
    return python("-c", LIST_THIRD_PARTY.format(module=module)).stdout.strip()


def test_import_kvkernels_loads_no_third_party_module() -> None:
    assert third_party("kvkernels") == ""


def test_the_pure_core_loads_no_third_party_module() -> None:
    assert third_party(", ".join(f"kvkernels.{name}" for name in PURE)) == ""


def test_the_check_sees_a_third_party_module() -> None:
    assert "numpy" in third_party("kvkernels, numpy")


def test_listing_names_imports_no_backend() -> None:
    code = "import sys, kvkernels.registry as r; r.names(); print('kvkernels.cpu' in sys.modules)"
    assert python("-c", code).stdout.strip() == "False"


def cumulative_ms(report: str, module: str) -> float:
    """Cumulative import time in ms, from the report of ``-X importtime`` (self | cumulative)."""
    pattern = rf"^import time:\s+\d+ \|\s+(\d+) \|\s+{re.escape(module)}$"
    match = re.search(pattern, report, re.MULTILINE)
    assert match is not None, report
    return int(match.group(1)) / 1000


def test_import_time() -> None:
    taken = []
    for _ in range(3):  # the machine may be busy; the least of three is what the import needs
        report = python("-X", "importtime", "-c", "import kvkernels").stderr
        taken.append(cumulative_ms(report, "kvkernels"))
        if taken[-1] < LIMIT_MS:
            return
    raise AssertionError(f"import kvkernels took {taken} ms, limit {LIMIT_MS} ms")


def test_import_time_reads_the_cumulative_column() -> None:
    report = "import time:       120 |     250120 |   kvkernels.op\n"
    report += "import time:       100 |     150220 | kvkernels\n"
    assert cumulative_ms(report, "kvkernels") == 150.22
