"""The emulator, for every test here; without a C++ compiler CI fails and a desk skips."""

from __future__ import annotations

import os

import pytest

from kvkernels.registry import open_device
from kvkernels.simt.device import SimtDevice
from kvkernels.simt.emulator.build import HINT, compiler
from kvkernels.simt.emulator.driver import EmulatorDriver


@pytest.fixture
def driver() -> EmulatorDriver:
    if compiler() is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"no C++ compiler. {HINT}")
        pytest.skip(HINT)
    return EmulatorDriver()


@pytest.fixture
def device(driver: EmulatorDriver) -> SimtDevice:
    opened = open_device("simt:0")
    assert isinstance(opened, SimtDevice)
    return opened
