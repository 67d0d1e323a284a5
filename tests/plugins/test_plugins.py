"""A third-party backend, really built and installed, and broken ones beside it.

Everything runs in a child process with the installed packages on its path, as a user would have it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvkernels.backend import API_VERSION

ROOT = Path(__file__).parents[2]
EXAMPLE = Path(__file__).parent / "kvk-example"

REPORT = """
import json
import kvkernels
from kvkernels import registry
from kvkernels.op import AttentionOp, LayerSpec
print(json.dumps({
    "version": kvkernels.__version__,
    "backends": sorted(registry.backends()),
    "statuses": [s.to_json() for s in registry.statuses()],
}))
"""

USE = """
from kvkernels.dispatch import decide
from kvkernels.op import AttentionOp, LayerSpec
from kvkernels.registry import open_device
device = open_device("example:0")
spec = LayerSpec(n_head=8, n_kv_head=2, head_dim=128)
op = AttentionOp.for_layer(
    spec, device.caps.id, n_q=3, n_kv=40, body=False, stage=True, current=True
)
decision = decide(op, device.table, device.caps)
out = device.run(decision.entry, op, {})
device.synchronize()
print(decision.route, decision.entry, out.shape, float(abs(out).max()))
"""


def python(site: Path, code: str) -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        cwd=site,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def report(site: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(python(site, REPORT))
    return data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which pip has installed the example package."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed, so the example cannot be built offline")
    target = tmp_path_factory.mktemp("site")
    # A copy, so that building writes nothing into the repository.
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "kvk-example")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", "-q", *options, "--target", str(target)]
    result = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return target


def test_an_installed_backend_is_listed(site: Path) -> None:
    data = report(site)
    assert "example" in data["backends"]
    (status,) = [s for s in data["statuses"] if s["name"] == "example"]
    assert status["state"] == "ok"
    assert [d["id"] for d in status["devices"]] == ["example:0"]


def test_an_installed_backend_opens_decides_and_runs(site: Path) -> None:
    assert python(site, USE).split() == [
        *("native", "example/attend_zeros", "(3,", "8,", "128)", "0.0"),
    ]


def fake_package(site: Path, name: str, source: str, package: str) -> None:
    module = package.replace("-", "_")
    (site / f"{module}.py").write_text(source)
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvkernels.backends]\n{name} = {module}:B\n")


def minimal(name: str, version: int = API_VERSION, probe: str = "return []") -> str:
    return (
        f"class B:\n    name = {name!r}\n    api_version = {version}\n    table = ()\n"
        f"    def probe(self):\n        {probe}\n"
        "    def open(self, device_id):\n        raise KeyError(device_id)\n"
    )


def test_broken_plugins_are_statuses_and_the_good_one_still_works(
    site: Path, tmp_path: Path
) -> None:
    mixed = shutil.copytree(site, tmp_path / "mixed")
    fake_package(mixed, "noimport", "import library_nobody_has\n", "kvk-noimport")
    fake_package(mixed, "future", minimal("future", version=99), "kvk-future")
    probe = "raise OSError('driver not loaded')"
    fake_package(mixed, "raising", minimal("raising", probe=probe), "kvk-raising")
    fake_package(mixed, "quits", "raise SystemExit(1)\n", "kvk-quits")
    fake_package(mixed, "cpu", minimal("cpu"), "kvk-takes-cpu")
    data = report(mixed)
    states = {(s["name"], s["state"]): s["detail"] for s in data["statuses"]}
    for key, text in {
        ("noimport", "broken"): "library_nobody_has",
        ("future", "api_mismatch"): "API version 99",
        ("raising", "broken"): "driver not loaded",
        ("quits", "broken"): "SystemExit",
        ("cpu", "conflict"): "kvk-takes-cpu",
        ("example", "ok"): "",
    }.items():
        assert key in states, states
        assert text in states[key]
    # The plugin that wants the name of the built-in changes nothing about the built-in.
    own = [s["state"] for s in report(site)["statuses"] if s["name"] == "cpu"]
    assert [s["state"] for s in data["statuses"] if s["name"] == "cpu"] == [*own, "conflict"]
    assert python(mixed, USE).startswith("native example/attend_zeros")
