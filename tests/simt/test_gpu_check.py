"""The script for people with a GPU, on the emulator: all of its steps, and that it finds faults."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import gpu_check

from kvkernels.capabilities import DeviceCaps
from kvkernels.simt.emulator.backend import EmulatorDevice
from kvkernels.simt.emulator.driver import EmulatorDriver


@pytest.fixture(autouse=True)
def _emulator(driver: EmulatorDriver) -> None:
    """Skips without a compiler."""


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "simt:0", "--dry", *args])
    return gpu_check.main()


def test_a_device_that_is_right_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--out", str(tmp_path)) == 0, capsys.readouterr().out
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["failures"] == []
    assert report["parity"]["cases"] == report["parity"]["of"] == len(gpu_check.FEW)
    assert set(report["stored"].values()) == {0}
    assert set(report["repeat"]["different"].values()) == {1}
    assert "simt/attend_portable" in report["repeat"]["different"]
    assert {row["tokens"] for row in report["bandwidth"]["decode"]} == {1024, 2048}
    assert report["sanitizer"] == {"skipped": "not a CUDA device"} or "no compute" in str(report)
    (record,) = tmp_path.glob("simt-*.json")
    caps = DeviceCaps.from_json(record.read_text())
    assert caps.source == "probe"
    names = ("attend_portable", "attend_prefill_portable", "commit", "commit_rows", "commit_tail")
    assert {f"simt/{name}" for name in names} <= {*caps.qualified}
    assert set(caps.qualified.values()) == {"recorded"}


def test_a_device_that_is_wrong_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, count = EmulatorDevice.run, [0]

    def wrong(self: Any, entry: str, op: Any, call: Any) -> None:
        right(self, entry, op, call)
        if entry == "simt/attend_portable":
            count[0] += 1
            np.add(call.out, np.float32(1e-3 * count[0]), out=call.out)
        if entry == "simt/commit":
            call.buffers.v_records[:8] = 77

    monkeypatch.setattr(EmulatorDevice, "run", wrong)
    assert run(monkeypatch, "--out", str(tmp_path)) == 1
    said = capsys.readouterr().out
    assert "FAILED: parity: decode/k4v4/d64/h4x2/kv300/q1 by simt/attend_portable" in said
    assert "FAILED: stored: bytes that differ" in said
    assert "FAILED: repeat: simt/attend_portable: 3 different results of 3" in said
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert "simt/attend_portable" in report["parity"]["failed"]
    assert "simt/attend_portable" not in report["device"]["qualified"]


def test_an_error_of_the_device_is_a_failure_of_its_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a launch failed")

    monkeypatch.setattr(EmulatorDevice, "run", broken)
    assert run(monkeypatch, "--only", "repeat,parity", "--out", str(tmp_path)) == 1
    said = capsys.readouterr().out
    assert "FAILED: repeat: RuntimeError: a launch failed" in said
    assert "not one of this library's errors: RuntimeError: a launch failed" in said


@pytest.mark.parametrize(
    ("facts", "stem"),
    [({"compute_capability": 90}, "cuda-nvidia-h200-sm90"),
     ({"gfx": "gfx90a"}, "cuda-nvidia-h200-gfx90a"), ({}, "cuda-nvidia-h200")],
)  # fmt: skip
def test_names_of_records(facts: dict[str, Any], stem: str) -> None:
    assert gpu_check.file_stem("cuda", "NVIDIA H200", facts) == stem
