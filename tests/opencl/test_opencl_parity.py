"""Attention on an OpenCL device (PoCL in CI: no evidence about any GPU)."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention import again, recorded
from numpy.testing import assert_allclose

from kvkernels.calls import AttendCall
from kvkernels.simt.attend import attend
from kvkernels.simt.device import SimtDevice
from kvkernels.testing import parity
from kvkernels.testing.cases import Case, by_id, select

ALL = select("decode/*/d64/h4x2/kv300/q1")
FEW = ((2, 8), (3, 3), (4, 6), (5, 5), (6, 4), (8, 2))
# A specialisation takes PoCL seconds to compile: every width of K and of V once, the rest is slow.
PAIRS = [
    pytest.param(
        case.id,
        marks=[] if (case.layer.k_bits, case.layer.v_bits) in FEW else pytest.mark.slow,
    )
    for case in ALL
]
QUICK = [
    by_id(case_id)
    for case_id in (
        "decode/k3v5/d128/h4x2/kv300/q3",
        "prefill/k8v8/d64/h4x2/kv330/q17",
        "aware/k4v4/d64/h6x2/kv450/q3",
        "tail/k5v4/d64/h4x2/kv700/q3/tail256/add-heads",
        "standard/q8_0-q4_0/d64/h4x2/kv257/q17/length",
        "standard/bf16-q4_1/d96/h4x2/kv150/q3",
    )
]
FIELDS = ("k_records", "v_records", "k_exact", "v_exact", "k_ring", "v_ring")


def moved(device: SimtDevice, call: AttendCall) -> AttendCall:
    """An emulator's call on this device."""
    held: dict[str, Any] = {
        name: device.upload(np.asarray(array))
        for name in FIELDS
        if (array := getattr(call.buffers, name)) is not None
    }
    buffers = dataclasses.replace(call.buffers, **held, prepared={})
    found = {name: device.upload(getattr(call, name)) for name in ("q", "k", "v", "out", "lse")}
    return dataclasses.replace(call, buffers=buffers, **found)


def attended(device: SimtDevice, case_id: str) -> tuple[Any, Any]:
    call, prefill = recorded(case_id)
    there = moved(device, again(call))
    attend(there, device.driver, device.scratch, prefill=prefill)
    return device.download(there.out), device.download(there.lse)


def test_F08_no_width_is_missing() -> None:
    assert len(PAIRS) == 36
    now = [case.layer for case, param in zip(ALL, PAIRS, strict=True) if not param.marks]
    assert {x.k_bits for x in now} == {x.v_bits for x in now} == {2, 3, 4, 5, 6, 8}


@pytest.mark.parametrize("case_id", PAIRS)
def test_F08_every_pair_of_widths_is_what_the_emulator_gives(
    device: SimtDevice, case_id: str
) -> None:
    call, _ = recorded(case_id)
    out, lse = attended(device, case_id)
    assert_allclose(out, np.asarray(call.out), rtol=0, atol=1e-5)
    assert_allclose(lse, np.asarray(call.lse), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.id)
def test_parity(device: SimtDevice, case: Case) -> None:
    assert [r.to_json() for r in parity.run_all(device, case) if not r.passed] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", select(quick=True)[::4], ids=lambda case: case.id)
def test_parity_quick_grid(device: SimtDevice, case: Case) -> None:
    assert [r.to_json() for r in parity.run_all(device, case) if not r.passed] == []


PARTLY = [f"length/k5v3/d64/h4x2/kv{n}/q{q}" for n, q in ((1, 1), (129, 1), (129, 3), (257, 3))]


@pytest.mark.parametrize("case_id", PARTLY)
def test_F34_twenty_times_the_same_bits(device: SimtDevice, case_id: str) -> None:
    found = {b"".join(x.tobytes() for x in attended(device, case_id)) for _ in range(20)}
    assert len(found) == 1


CODE = """
from kvkernels.registry import open_device
from kvkernels.testing import parity
from kvkernels.testing.cases import by_id
device = open_device("opencl:0")
for case in ("length/k5v3/d64/h4x2/kv129/q3", "standard/q8_0-q4_0/d64/h4x2/kv33/q1/length"):
    result = parity.run_case(device, by_id(case))
    assert result.passed, result
"""


@pytest.mark.parametrize(
    "method",
    [
        "cbs",
        pytest.param("loops", marks=pytest.mark.slow),
        pytest.param("loopvec", marks=pytest.mark.slow),
    ],
)
def test_F34_with_every_way_that_pocl_makes_work_groups(
    device: SimtDevice, tmp_path: Path, method: str
) -> None:
    if "PoCL" not in device.caps.driver:
        pytest.skip(f"{device.caps.driver} is not PoCL")
    env = os.environ | {
        "POCL_WORK_GROUP_METHOD": method,
        "POCL_CACHE_DIR": str(tmp_path),
        "PYOPENCL_NO_CACHE": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=env, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
