"""An OpenCL device, and the emulator's helpers; without a driver CI fails and a desk skips."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from opencl_tools import missing

from kvkernels.opencl.probe import probe_opencl
from kvkernels.registry import open_device
from kvkernels.simt.device import SimtDevice

sys.path.insert(0, str(Path(__file__).parents[1] / "simt"))
HINT = "no OpenCL device (apt-get install pocl-opencl-icd)"


@pytest.fixture(scope="session")
def device() -> SimtDevice:
    if not probe_opencl().ok:
        missing(HINT)
    opened = open_device("opencl:0")
    assert isinstance(opened, SimtDevice)
    return opened
