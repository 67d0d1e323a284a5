"""Without a C++ compiler CI fails and a desk skips."""

from __future__ import annotations

import os

import pytest

from kvkernels.simt.emulator.build import HINT, compiler


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if compiler() is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"no C++ compiler. {HINT}")
        pytest.skip(HINT)
