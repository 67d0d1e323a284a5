"""``kvk explain`` with a precision tail: what it says, as text and as JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvkernels.cli import main


def explain(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["explain", *map(str, args)], catch_exceptions=False)


def explain_json(*args: str | Path) -> dict[str, Any]:
    result = explain("--json", *args)
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads(result.stdout)
    assert data["schema"] == "kvk.decision/1"
    return data


STANDARD = ("--k", "q8_0", "--v", "q4_0")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--tail", "300"),
         "tail of full@l0: 300 rows asked for, 384 exact (overlay, f16, 1 more for rollback)"),
        ((), "tail of full@l0: 0 rows asked for, 128 exact (stage, f16)"),
        (STANDARD, "tail of full@l0: 0 rows asked for, 0 exact (none)"),
        ((*STANDARD, "--tail", "auto"),
         "tail of full@l0: 1024 rows asked for, 1024 exact (overlay, bf16, 1 more for rollback)"),
        ((*STANDARD, "--tail", "full=300", "--tail-dtype", "f16"),
         "tail of full@l0: 300 rows asked for, 300 exact (overlay, f16, 1 more for rollback)"),
        ((*STANDARD, "--window", "512", "--tail", "swa=600"),
         "tail of swa@l0: 600 rows asked for, 512 exact (native exact, bf16, 1 more for rollback)"),
    ],
)  # fmt: skip
def test_text(args: tuple[str, ...], says: str) -> None:
    result = explain(*args)
    assert result.exit_code == 0
    assert result.stdout.startswith("native: cpu/attend_decode")
    assert says in result.stdout.splitlines()


def test_notes_are_told() -> None:
    text = explain("--tail", "300").stdout
    assert "  full@l0: 300 rows asked for, 384 kept; the window is 4096 rows" in text
    text = explain("--tail", "100", "--tail-dtype", "bf16").stdout
    assert "its 128 rows lie in the stage, as f16 and not bf16" in text


def test_json() -> None:
    data = explain_json(*STANDARD, "--tail", "200", "--tail-dtype", "f16", "--n-kv", "1000")
    tail = data["tail"]
    assert (tail["group"], tail["raw"], tail["requested"], tail["effective"]) == (
        "full@l0", 200, 200, 200,
    )  # fmt: skip
    assert (tail["dtype"], tail["representation"], tail["rollback"], tail["window"]) == (
        "f16", "overlay", 1, 1000,
    )  # fmt: skip
    op = data["op"]
    assert (op["tail"], op["tail_rows"], op["tail_dtype"], op["bodyless"]) == (
        True, 200, "f16", False,
    )  # fmt: skip


def test_json_of_a_covered_window_has_no_body() -> None:
    data = explain_json(*STANDARD, "--window", "512", "--tail", "512")
    assert data["tail"]["representation"] == "native_exact"
    op = data["op"]
    assert (op["bodyless"], op["body"], op["k_type"], op["v_type"]) == (True, False, "bf16", "bf16")
    data = explain_json(*STANDARD, "--tail", "4096")
    assert (data["op"]["k_type"], data["op"]["bodyless"], data["op"]["tail_rows"]) == (
        "bf16", False, 0,
    )  # fmt: skip


def test_the_write_of_a_tail() -> None:
    data = explain_json("--kind", "tail", "--tail", "256", "--n-q", "4")
    assert data["entry"] == "cpu/commit_tail"
    assert data["op"]["kind"] == "tail"


def test_a_layer_file_may_ask_for_a_tail(tmp_path: Path) -> None:
    path = tmp_path / "layer.json"
    layer = {"n_head": 4, "n_kv_head": 4, "head_dim": 64, "k": "kvarn5", "tail": 200, "n_kv": 900}
    path.write_text(json.dumps(layer))
    assert explain_json("--layer", path)["tail"]["effective"] == 256
    result = explain("--layer", path, "--tail", "100")
    assert result.exit_code == 2
    assert "besides the tail of layer 0; needed one of the two" in result.stderr


@pytest.mark.parametrize(
    ("tail", "says"),
    [
        ("512,swa=512", "'512' in '512,swa=512'; needed name=N in every entry, or in none"),
        ("full=1,full=2", "'full' a second time"),
        ("swa=1", "unknown 'swa'; needed one of full, full@l0"),
        ("1,2", "2 counts in '1,2'; needed 1, one for each of full@l0"),
        ("4294967296", "needed a whole number of rows, 0..4294967295"),
        ("many", "valid: '', 'auto', 'N', 'N0,N1' or 'full=N,swa=N'"),
        ("aut", "did you mean 'auto'?"),
        ("-5", "'-5'"),
    ],
)
def test_a_bad_request_is_a_usage_error(tail: str, says: str) -> None:
    result = explain("--tail", tail, "--json")
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_bad_dtype_is_a_usage_error() -> None:
    result = explain("--tail", "100", "--tail-dtype", "f32")
    assert result.exit_code == 2
    assert "'f32' is not one of 'f16', 'bf16'" in result.stderr


def test_a_tail_on_mla_is_refused_F05(tmp_path: Path) -> None:
    path = tmp_path / "layer.json"
    path.write_text(json.dumps({"n_head": 4, "n_kv_head": 1, "head_dim": 64, "attention": "mla"}))
    result = explain("--layer", path, "--tail", "512")
    assert result.exit_code == 2
    assert "a tail of 512 rows for full@l0 with K-only layer 0" in result.stderr
    result = explain("--layer", path)
    assert result.exit_code == 3
    assert "op.attention" in result.stdout
