"""A backend that crashes or hangs while it is probed becomes a line, and the others still work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

PLUGIN = """
import os, signal, sys, time
class B:
    name = {name!r}
    api_version = 3
    table = ()
    def probe(self):
        {body}
    def open(self, device_id):
        raise KeyError(device_id)
"""
BODIES = {
    "crashes": "os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": "time.sleep(60)",
    "leaves": "print('noise'); sys.stderr.write('driver said no\\n'); os._exit(7)",
    "raises": "raise OSError('driver not loaded')",
}


def install(site: Path, name: str, body: str) -> None:
    (site / f"kvk_{name}.py").write_text(PLUGIN.format(name=name, body=body))
    info = site / f"kvk_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvk-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvkernels.backends]\n{name} = kvk_{name}:B\n")


def probe(site: Path, *args: str, timeout_s: str = "4") -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]),
        "KVK_PROBE_TIMEOUT": timeout_s,
    }
    return subprocess.run(
        [sys.executable, "-m", "kvkernels", "probe", *args],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        cwd=site,
        timeout=90,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    site = tmp_path_factory.mktemp("site")
    for name, body in BODIES.items():
        install(site, name, body)
    done = probe(site, "--json")
    assert done.returncode == 0, done.stderr
    return {b["name"]: b for b in json.loads(done.stdout)["backends"]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("crashes", "SIGSEGV"),
        ("hangs", "no answer within 4 s"),
        ("leaves", "exit status 7: driver said no"),
        ("raises", "driver not loaded"),
    ],
)
def test_it_becomes_a_line(report: dict[str, dict[str, Any]], name: str, text: str) -> None:
    assert report[name]["state"] == "broken"
    assert text in report[name]["detail"]
    assert report[name]["devices"] == []


def test_the_others_still_work(report: dict[str, dict[str, Any]]) -> None:
    assert report["cpu"]["state"] == "ok"


def test_a_wrong_time_limit_is_a_usage_error(tmp_path: Path) -> None:
    done = probe(tmp_path, timeout_s="soon")
    assert done.returncode == 2
    assert "KVK_PROBE_TIMEOUT" in done.stderr


def test_nothing_usable_ends_with_1(tmp_path: Path) -> None:
    done = probe(tmp_path, timeout_s="0.001")
    assert done.returncode == 1
    assert "no answer within" in done.stdout


# Loaded by every Python that is started with it on its path, so in the children of a probe too.
NOTHING = """
import ctypes, sys
for name in ("cupy", "pyopencl"):
    sys.modules[name] = None  # importing it raises
real = ctypes.CDLL
class CDLL(real):
    def __init__(self, name, *args, **kwargs):
        if "hip" in str(name):
            raise OSError(f"{name}: cannot open shared object file: No such file or directory")
        super().__init__(name, *args, **kwargs)
ctypes.CDLL = CDLL
"""


@pytest.mark.parametrize("args", [(), ("--json",), ("--matrix",)])
def test_a_machine_with_no_driver_and_no_package_still_gets_its_table(
    tmp_path: Path, args: tuple[str, ...]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOTHING)
    done = probe(tmp_path, *args, timeout_s="20")
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    if args == ("--matrix",):
        assert text.count("cpu:0,") > 5
        return
    if args == ("--json",):
        states = {b["name"]: b["state"] for b in json.loads(done.stdout)["backends"]}
        gone = ("cuda", "hip", "opencl")
        assert states == {"cpu": "ok"} | dict.fromkeys(gone, "unavailable")
    for part in (
        "CuPy is not installed",
        "pip install 'kvkernels[cuda13]'",
        "no HIP runtime library",
        "Install ROCm",
        "pyopencl is not installed",
        "pip install 'kvkernels[opencl]'",
    ):
        assert part in text
