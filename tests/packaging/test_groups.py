"""Which tests must have run in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A copy of the hooks, and tests of every group; the last one lacks a compiler.
TEST = """import pytest


def test_the_yardstick() -> None:
    {}
"""


@pytest.mark.parametrize(
    ("body", "machine", "status"),
    [
        ("pass", "x86_64", 0),
        ("pytest.skip('no C compiler')", "x86_64", 1),
        ("pytest.skip('yardstick.c is for x86-64')", "aarch64", 0),
    ],
)
@pytest.mark.parametrize("in_ci", ["true", ""])
def test_a_yardstick_that_did_not_run_fails_in_ci(
    tmp_path: Path, body: str, machine: str, status: int, in_ci: str
) -> None:
    folder = tmp_path / "tests"
    for group in ("pure", "cpu", "cli", "simt", "cuda", "hip", "opencl", "packaging"):
        (folder / group).mkdir(parents=True)
        (folder / group / f"test_{group}.py").write_text("def test_it() -> None:\n    pass\n")
    (folder / "cpu" / "test_c.py").write_text(TEST.format(body))
    hooks = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    fixed = f"import platform\nplatform.machine = lambda: {machine!r}\n"
    (folder / "conftest.py").write_text(hooks + fixed)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "."],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"CI": in_ci},
        timeout=60,
    )
    assert done.returncode == (status if in_ci else 0), done.stdout
    assert ("the group 'yardstick' must run" in done.stdout) == (bool(in_ci) and status == 1)
