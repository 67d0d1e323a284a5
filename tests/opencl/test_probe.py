"""The probe against the real pyopencl: with no driver at all, and with whatever is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvkernels.capabilities import DeviceCaps
from kvkernels.opencl.probe import probe_opencl

pytest.importorskip("pyopencl")
ROOT = Path(__file__).parents[2]
CODE = """
import json
from kvkernels.opencl.probe import probe_opencl
print(json.dumps(probe_opencl().to_json()))
"""


def test_without_a_driver_it_says_what_to_install(tmp_path: Path) -> None:
    empty = {"OCL_ICD_VENDORS": f"{tmp_path}/", "OCL_ICD_FILENAMES": "", "OPENCL_VENDOR_PATH": ""}
    env = os.environ | empty | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        check=True,
        env=env,
        timeout=60,
    )
    status = json.loads(done.stdout)
    assert (status["state"], status["devices"]) == ("unavailable", [])
    assert "PLATFORM_NOT_FOUND_KHR" in status["detail"]
    assert "/etc/OpenCL/vendors" in status["hint"]


def test_what_is_installed_becomes_facts() -> None:
    status = probe_opencl()
    if not status.ok:
        assert status.hint
        pytest.skip(f"no OpenCL device here: {status.detail}")
    for index, caps in enumerate(status.devices):
        assert caps.id == f"opencl:{index}"
        assert DeviceCaps.from_json(caps.to_json()) == caps
        for fact in ("version", "compiler", "max_threads", "local_memory", "max_alloc", "memory"):
            value = caps.facts[fact]
            assert isinstance(value, int), fact
            assert value > 0
        assert caps.facts["type"] in ("cpu", "gpu", "accelerator", "custom")
        assert all(item.advertised is item.enabled for item in caps.features.values())
