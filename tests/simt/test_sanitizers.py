"""Kernels under ThreadSanitizer and AddressSanitizer, in processes that preload them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from mutants import barriers
from sanitized import FAULTS

HERE = Path(__file__).parent
#: what they run between them: rotation, attention to records, exact rows, tiles, a ring and current
#: rows, decode and prefill; merging; staging, both encoders, tiles and rings; the check of rows
CASES = (
    "decode/k4v4/d64/h4x2/kv300/q1",
    "prefill/k4v4/d64/h4x2/kv330/q17",
    "aware/k4v4/d64/h6x2/kv450/q3",
    "standard/q8_0-q4_0/d64/h4x2/kv257/q17/length",
    "standard/f16-f16/d64/h4x2/kv300/q1",
    "tail/k4v4/d64/h4x2/kv600/q1/tail256f16",
)
SMALL = CASES[0]
SAID = {"tsan": "WARNING: ThreadSanitizer", "asan": "ERROR: AddressSanitizer"}


@cache
def _runtime(mode: str) -> str | None:
    """The sanitizer's library of g++, None when it is not installed."""
    if shutil.which("g++") is None:
        return None
    command = ["g++", f"-print-file-name=lib{mode}.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return found if Path(found).is_absolute() else None


def sanitized(mode: str, fault: str, *cases: str) -> tuple[int, str]:
    """Exit status and output of ``sanitized.py``."""
    library = _runtime(mode)
    if library is None:
        text = f"no lib{mode} of g++ (apt-get install g++)"
        if os.environ.get("CI") == "true":
            pytest.fail(text)
        pytest.skip(text)
    env = os.environ | {
        "LD_PRELOAD": library,
        "CXX": "g++",
        "PYTHONPATH": str(HERE.parents[1]),
        "OPENBLAS_NUM_THREADS": "1",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1",
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    command = [sys.executable, str(HERE / "sanitized.py"), mode, fault, *cases]
    done = subprocess.run(
        command, env=env, timeout=600, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("mode", SAID)
def test_clean(mode: str) -> None:
    status, text = sanitized(mode, "none", *CASES)
    assert SAID[mode] not in text
    assert (status, text.splitlines()[-1]) == (0, "done")


@pytest.mark.parametrize("name", ["softmax", "records"])
def test_a_missing_barrier_is_reported_with_its_source(name: str) -> None:
    _, text = sanitized("tsan", f"{name}:{barriers(name)[0]}", SMALL)
    assert SAID["tsan"] in text
    assert f"{name}.inc:" in text


@pytest.mark.parametrize("fault", FAULTS)
def test_what_lies_outside_is_reported_with_its_source(fault: str) -> None:
    status, text = sanitized("asan", fault, SMALL)
    assert status != 0
    assert SAID["asan"] in text
    source = "softmax" if fault == "shared-too-small" else FAULTS[fault][0]
    assert f"{source}.inc:" in text or "common.inc:" in text
