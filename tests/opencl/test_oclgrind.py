"""Kernels under oclgrind: races, uninitialised values and bounds that it sees, in a process of its
own. It exits 0 whatever it found, so its messages are counted.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import barriers
from opencl_tools import missing

HERE = Path(__file__).parent
#: what oclgrind says; it must say none of it
SAID = re.compile(
    r"data race|ninitialized|Invalid (?:read|write)|divergence|FATAL ERROR|Unsupported", re.I
)


def checked(fault: str, *cases: str, uninitialized: bool = True) -> tuple[int, str]:
    """(messages, output) of ``checked.py``. Looking for uninitialised values takes code that is not
    optimised (it does not know all instructions), and minutes where records are sealed.
    """
    if shutil.which("oclgrind") is None:
        missing("no oclgrind (apt-get install oclgrind)")
    more = ["--uninitialized", "--build-options", "-cl-opt-disable"] if uninitialized else []
    script = [sys.executable, str(HERE / "checked.py"), fault, *cases]
    command = ["oclgrind", "--data-races", *more, *script]
    env = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "PYOPENCL_NO_CACHE": "1"}
    done = subprocess.run(
        command, env=env, timeout=900, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return len(SAID.findall(done.stdout)), done.stdout


@pytest.mark.parametrize(
    "case",
    [
        "standard/q8_0-q4_0/d64/h4x2/kv33/q1/length",
        pytest.param("standard/q8_0-q4_0/d64/h4x2/kv33/q17/length", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_said(case: str) -> None:
    found, text = checked("none", case)
    assert found == 0, text[-3000:]
    assert text.splitlines()[-1] == "done"


@pytest.mark.parametrize(
    "case",
    [
        "length/k5v3/d64/h4x2/kv129/q1",
        pytest.param("length/k5v3/d64/h4x2/kv129/q16", marks=pytest.mark.slow),
        pytest.param("aware/k4v4/d64/h6x2/kv450/q3", marks=pytest.mark.slow),
    ],
)
def test_records_have_no_race_and_stay_in_bounds(case: str) -> None:
    found, text = checked("none", case, uninitialized=False)
    assert found == 0, text[-3000:]
    assert text.splitlines()[-1] == "done"


def test_a_missing_barrier_is_said_with_its_source() -> None:
    line = barriers("partial")[0]
    found, text = checked(f"partial:{line}", "standard/q8_0-q4_0/d64/h4x2/kv1/q1/length")
    assert found > 0
    assert "data race" in text
