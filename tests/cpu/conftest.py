"""One opened CPU for all tests here."""

from __future__ import annotations

import pytest

from kvkernels.backend import Device
from kvkernels.registry import open_device


@pytest.fixture(scope="session")
def device() -> Device:
    return open_device("cpu:0")
