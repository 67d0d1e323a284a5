"""What tests of OpenCL share."""

from __future__ import annotations

import os

import pytest


def missing(text: str) -> None:
    """Fail in CI, skip at a desk."""
    if os.environ.get("CI") == "true":
        pytest.fail(text)
    pytest.skip(text)
