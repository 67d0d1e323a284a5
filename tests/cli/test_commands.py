"""Exit statuses, schemas and messages of the commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from kvkernels.capabilities import DeviceCaps
from kvkernels.cli import COMMANDS, exit_status, main
from kvkernels.errors import CapacityError, InputError, KvkError, UnsupportedOp

ROOT = Path(__file__).parents[2]
DEVICES = ROOT / "capabilities" / "devices"


def kvk(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args], catch_exceptions=False)


def process(*args: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = ["-c", code] if code else ["-m", "kvkernels", *args]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        timeout=60,
    )


def test_help_names_every_command_and_imports_none() -> None:
    code = "import sys\nfrom kvkernels.cli import main\n"
    code += "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
    code += "print([m for m in ('numpy', 'numba', 'rich') if m in sys.modules])"
    done = process(code=code)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"parity"}))
def test_every_command_has_help(name: str) -> None:
    result = kvk(name, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_an_unknown_command_is_a_usage_error_with_the_nearest_name() -> None:
    done = process("prob")
    assert done.returncode == 2
    assert "did you mean 'probe'?" in done.stderr
    assert done.stdout == ""


def test_errors_become_statuses() -> None:
    assert exit_status(UnsupportedOp([])) == 3
    assert exit_status(InputError("x", found=1, needed=2)) == 2
    assert exit_status(CapacityError("full")) == 1


def test_no_kvk_error_escapes_as_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def broken() -> None:
        raise KvkError("what went wrong")

    monkeypatch.setattr("kvkernels.cli.demo.demo", broken)
    result = kvk("demo")
    assert result.exit_code == 1
    assert "KvkError: what went wrong" in result.stderr
    assert "Traceback" not in result.stderr


# --- probe


def probe_json(*args: str) -> dict[str, Any]:
    result = kvk("probe", "--json", *args)
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(result.stdout)
    assert data["schema"] == "kvk.probe/1"
    return data


def test_probe_json_has_the_cpu_with_its_entries() -> None:
    (cpu,) = [b for b in probe_json()["backends"] if b["name"] == "cpu"]
    assert cpu["state"] == "ok"
    (device,) = cpu["devices"]
    entries = {e["entry"]: e for e in device["entries"]}
    assert entries["cpu/attend_decode"]["route"] == "native"
    assert entries["cpu/attend_decode"]["available"] is True
    assert {"entry", "kind", "route", "qualified", "needs", "reasons"} <= entries[
        "cpu/commit"
    ].keys()


def test_probe_prints_a_table_and_a_matrix() -> None:
    assert "cpu/attend_decode" in kvk("probe").stdout
    lines = kvk("probe", "--matrix").stdout.splitlines()
    assert lines[0] == "device,name,entry,kind,route,available,qualified,reasons"
    assert any(line.startswith("cpu:0,") and "cpu/commit" in line for line in lines)


def test_probe_require_says_why_not() -> None:
    assert kvk("probe", "--require", "cpu/commit@cpu:0").exit_code == 0
    result = kvk("probe", "--require", "cpu/comit@cpu:0", "--require", "cuda/attend_mma@cuda:0")
    assert result.exit_code == 1
    assert "did you mean 'cpu/commit'?" in result.stderr
    assert "cuda/attend_mma@cuda:0: no such device" in result.stderr
    assert kvk("probe", "--require", "cpu/commit").exit_code == 2


def test_probe_of_a_device_that_is_not_there_is_a_refusal() -> None:
    result = kvk("probe", "--device", "cpu:7")
    assert result.exit_code == 3
    assert "found: cpu:0" in result.stderr
    assert kvk("probe", "--device", "nosuch:0").exit_code == 3


def test_a_recorded_device_explains_without_hardware(tmp_path: Path) -> None:
    path = tmp_path / "me.json"
    assert kvk("probe", "--device", "cpu:0", "--record", path).exit_code == 0
    assert DeviceCaps.from_json(path.read_text()).source == "recorded"
    result = kvk("explain", "--device-file", path)
    assert result.exit_code == 0
    assert result.stdout.startswith("native: cpu/attend_decode")


# --- explain


def test_explain_prints_the_decision() -> None:
    result = kvk("explain", "--n-q", "512")
    assert result.exit_code == 0
    assert result.stdout.startswith("native: cpu/attend_prefill")
    assert "[op.n_q]" in result.stdout


def test_explain_json_is_a_decision_and_a_refusal_ends_with_3() -> None:
    result = kvk("explain", "--head-dim", "80", "--json")
    assert result.exit_code == 3
    data = json.loads(result.stdout)
    assert data["schema"] == "kvk.decision/1"
    assert {"route", "entry", "op", "considered", "hint"} <= data.keys()
    assert data["route"] == "refuse"
    assert {r["id"] for row in data["considered"] for r in row["reasons"]} == {"op.head_dim_k"}


def test_explain_reads_a_layer_file(tmp_path: Path) -> None:
    path = tmp_path / "layer.json"
    layer = {"n_head": 4, "n_kv_head": 4, "head_dim": 64, "k": "kvarn5", "n_q": 2, "n_kv": 300}
    path.write_text(json.dumps(layer))
    result = kvk("explain", "--layer", path)
    assert result.exit_code == 0
    assert "q2 kv300" in result.stdout
    assert "kvarn5/kvarn4" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON object"),
        ('{"n_head": 4}', "no head_dim, n_kv_head"),
        ('{"n_head": 4, "n_kv_head": 4, "head_dim": 64, "n_qq": 1}', "did you mean 'n_q'?"),
        ('{"n_head": 4, "n_kv_head": 4, "head_dim": 64, "n_q": 9, "n_kv": 3}', "n_kv"),
        ('{"n_head": 4, "n_kv_head": 4, "head_dim": 64, "n_q": "one"}', "n_q"),
    ],
)
def test_a_wrong_layer_file_is_a_usage_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "layer.json"
    path.write_text(text)
    result = kvk("explain", "--layer", path)
    assert result.exit_code == 2
    assert message in result.stderr


def test_explain_for_a_backend_this_build_lacks_is_a_refusal() -> None:
    result = kvk("explain", "--device-file", DEVICES / "vulkan-lavapipe.json")
    assert result.exit_code == 3
    assert "no backend of this name" in result.stderr


def test_explain_for_a_card_that_nobody_here_has() -> None:
    path = DEVICES / "hip-rx7900xtx-gfx1100.json"
    result = kvk("explain", "--device-file", path, "--head-dim", "256")
    assert result.exit_code == 3
    assert "[policy.unqualified] needs a parity record of hip/attend_portable" in result.stdout
    result = kvk("explain", "--device-file", path, "--head-dim", "256", "--allow-unqualified")
    assert (result.exit_code, result.stdout[:28]) == (0, "native: hip/attend_portable\n")


def test_explain_takes_one_source() -> None:
    assert kvk("explain", "--head-dim", "64", "--case", "x").exit_code == 2
    assert kvk("explain", "--case", "no-such-case").exit_code == 2


def test_explain_policy_options() -> None:
    result = kvk("explain", "--entry", "cpu/attend_materialized")
    assert result.stdout.startswith("materialize: cpu/attend_materialized")
    result = kvk("explain", "--entry", "cpu/attend_materialized", "--no-materialize")
    assert result.exit_code == 3
    assert "policy.materialize" in result.stdout
