"""No module grows past what a newcomer can read in one sitting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "sizes.py"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *args], capture_output=True, text=True, check=False, timeout=30
    )


def test_every_module_is_within_the_limit() -> None:
    result = run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "kvkernels/dispatch.py" in result.stdout
    assert "total" in result.stdout


def test_a_long_module_fails_and_comments_do_not_count(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "a.py").write_text("x = 1\n" * 300 + "# why\n\n" * 50)
    assert run(str(package)).returncode == 0
    (package / "b.py").write_text("x = 1\n" * 301)
    result = run(str(package))
    assert result.returncode == 1
    assert "pkg/b.py  over 300" in result.stdout
    assert "   601 total" in result.stdout
