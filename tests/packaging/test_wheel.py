"""The wheel has what it needs, nothing else, and works on its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ("kvkernels", "pyproject.toml", "README.md", "LICENSE", "tests", "tools")
LIMIT_BYTES = 4 << 20


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=os.environ | env,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A copy, so that building writes nothing into the repository.
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc")
    for name in SOURCE:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=ignore)
        else:
            shutil.copy(path, source / name)
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_it_holds_the_package_and_no_more(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "py.typed",
        "data/demo_kv.npz",
        "data/README.md",
        "cli/__init__.py",
        "__main__.py",
    ):
        assert f"kvkernels/{name}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvkernels"}
    assert not [name for name in names if name.endswith((".pyc", ".nbi", ".nbc"))]
    assert wheel.stat().st_size < LIMIT_BYTES


def test_it_names_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (points,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
    assert "kvk = kvkernels.cli:main" in archive.read(points).decode()


def test_it_works_installed_elsewhere(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    options = ("--no-deps", "--no-index", "--disable-pip-version-check", "-q")
    install = (sys.executable, "-m", "pip", "install", *options, "--target", str(target))
    run(*install, str(wheel), cwd=tmp_path)
    kvk = (sys.executable, "-m", "kvkernels")
    assert "probe" in run(*kvk, "--help", cwd=tmp_path, PYTHONPATH=str(target))
    out = run(*kvk, "explain", "--json", cwd=tmp_path, PYTHONPATH=str(target))
    assert '"cpu/attend_decode"' in out
    code = "import kvkernels.bench.demo as d; print(d.__file__, d.capture('code').n)"
    where, n = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(target)).split()
    assert where.startswith(str(target))
    assert n == "512"
