"""Without a C++ compiler CI fails and a desk skips. Machine code is kept for one test only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvkernels.simt.emulator import build


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if build.compiler() is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"no C++ compiler. {build.HINT}")
        pytest.skip(build.HINT)
    build._folder()  # found before the variable changes: what the emulator built is kept
    monkeypatch.setenv("KVK_CACHE_DIR", str(tmp_path / "kept"))
