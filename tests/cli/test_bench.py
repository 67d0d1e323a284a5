"""Statistics, guards and lines of ``kvk bench``, and that the quick list really runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from kvkernels.bench import suites
from kvkernels.bench.measure import Effort, l3_bytes, machine_load, measure
from kvkernels.bench.report import Guards, compare, shown
from kvkernels.bench.report import Result as BenchResult
from kvkernels.bench.stats import Sample, paired_ratio, verdict
from kvkernels.bench.workload import attend64, numpy_step, random_rows, relative_error
from kvkernels.cli import main
from kvkernels.errors import InputError
from kvkernels.op import LayerSpec

BASELINES = ("numpy-f32", "numpy-f16", "cpu/attend_materialized", "activations=f32")
KEYS = {"schema", "case", "entry", "route", "device", "median_s", "iqr_s", "ratio", "baseline"}
KEYS |= {"error", "outcome", "target", "value", "unit", "load"}


def kvk(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, args)], catch_exceptions=False)


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_sample_statistics() -> None:
    sample = Sample((4.0, 1.0, 2.0, 3.0, 100.0))
    assert (sample.median_s, sample.min_s, sample.iqr_s) == (3.0, 1.0, 2.0)
    assert Sample((1.0,)).iqr_s == 0.0
    assert paired_ratio([2.0, 20.0, 3.0], [1.0, 10.0, 3.0]) == 2.0


def test_verdict_needs_factor_and_distance() -> None:
    assert verdict((1.0, 0.01), (0.5, 0.01)) == "faster"
    assert verdict((1.0, 0.01), (2.0, 0.01)) == "slower"
    assert verdict((1.0, 0.0), (1.05, 0.0)) == "~"
    assert verdict((1.0, 3.0), (2.0, 3.0)) == "~"


def test_measure_interleaves_and_counts_rounds() -> None:
    seen: list[str] = []
    calls = {"a": lambda: seen.append("a"), "b": lambda: seen.append("b")}
    samples = measure(calls, Effort(rounds=4, least_s=0.0, warmup=1))
    assert {len(s.seconds) for s in samples.values()} == {4}
    # Warm-up and calibration first; then rounds that begin with a, b, a, b.
    assert "".join(seen[-8:]) == "abbaabba"


def test_measure_cold_times_single_calls() -> None:
    samples = measure({"a": lambda: None}, Effort(rounds=2, warmup=0, cold=True))
    assert len(samples["a"].seconds) == 2
    assert l3_bytes() > 1 << 16
    assert machine_load(3).spin >= 1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_baselines_compute_attention(dtype: str) -> None:
    spec = LayerSpec(n_head=4, n_kv_head=2, head_dim=64)
    rows = random_rows(spec, 700)
    out = numpy_step(spec, rows.q[-1], rows.k.astype(dtype), rows.v.astype(dtype))()
    exact = attend64(spec, rows.q[-1], rows.k.astype(np.float64), rows.v.astype(np.float64))
    assert relative_error(out, exact) < (1e-5 if dtype == "float32" else 3e-3)


def test_shown() -> None:
    assert [shown(x) for x in (None, 2.0, 0.0125, 3e-6)] == ["-", "2 s", "12.5 ms", "3 us"]


def result(ratio: float) -> BenchResult:
    return BenchResult(case="c", device="cpu:0", ratio=ratio, baseline="b", median_s=1.0)


def test_guards_break_below_their_ratio() -> None:
    guards = Guards({"c vs b": 2.0, "other vs b": 1.0})
    assert guards.broken([result(2.5)]) == []
    assert guards.broken([result(1.5)]) == [("c vs b", 2.0, 1.5)]
    assert guards.unmatched([result(2.5)]) == ["other vs b"]


def test_the_guard_file_guards_cases_that_exist() -> None:
    guards = Guards.read(Path(__file__).parents[2] / "bench" / "guards.toml")
    for name in guards.least:
        case, _, _ = name.partition(" vs ")
        kind, size = case.split("/")[1].split("-")[0], case.partition("n4096")[1][1:] or "32768"
        assert f"{case.split('/')[0]}/{kind}/{size}" in {b.id for b in suites.BENCHES}


@pytest.mark.parametrize("text", ["", "[ratio]\n", "[ratio]\na = 'x'\n", "]"])
def test_a_wrong_guard_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "guards.toml"
    path.write_text(text)
    with pytest.raises(InputError, match="guards"):
        Guards.read(path)


def test_compare_two_runs(tmp_path: Path) -> None:
    load = machine_load(1)
    for name, seconds in (("a", 1.0), ("b", 2.0)):
        made = BenchResult(case="c", device="cpu:0", median_s=seconds, iqr_s=0.0)
        (tmp_path / name).write_text(json.dumps(made.to_json(load, load)) + "\n")
    done = kvk("--compare", tmp_path / "a", tmp_path / "b", "--json")
    assert done.exit_code == 0
    (line,) = lines(done)
    assert (line["schema"], line["ratio"]) == ("kvk.bench.compare/1", 2.0)
    assert line["verdict"] == "slower"
    assert "slower" in kvk("--compare", tmp_path / "a", tmp_path / "b").stdout
    (tmp_path / "b").write_text("{}\n")
    assert kvk("--compare", tmp_path / "a", tmp_path / "b").exit_code == 2
    assert compare({}, {}) == []


def test_nothing_selected_ends_with_1() -> None:
    assert kvk("--filter", "no/such").exit_code == 1


def test_list_names_the_benches() -> None:
    listed = kvk("--list").stdout.split()
    assert {"decode/k4v4/4096", "decode/k2v2/32768", "commit/k4v4", "overhead/attend"} <= set(
        listed
    )


def test_the_quick_list_runs_and_every_line_has_the_schema() -> None:
    done = kvk("--quick", "--json")
    assert done.exit_code == 0, done.stderr
    found = lines(done)
    assert {line["schema"] for line in found} == {"kvk.bench/1"}
    for line in found:
        assert line.keys() >= KEYS
        assert line["outcome"] != "wrong", line
    decode = {line["baseline"]: line for line in found if line["case"].startswith("decode/")}
    assert set(decode) == set(BASELINES)
    assert all(0 <= line["error"] < 3e-2 for line in decode.values())
    commit = next(line for line in found if line["case"].startswith("commit/"))
    assert (commit["entry"], commit["route"], commit["error"]) == ("cpu/commit", "native", 0.0)


@pytest.mark.slow
def test_the_guards_hold_on_this_machine() -> None:
    done = kvk("--quick", "--guard")
    assert done.exit_code == 0, done.stderr


def test_a_guard_for_what_a_machine_lacks_is_no_mistake() -> None:
    guards = Guards({"c vs b": 2.0})
    lost = BenchResult(case="c", device="cpu:0", baseline="b", note="no C compiler")
    assert guards.unmatched([lost]) == []
    assert guards.broken([lost]) == []


def test_a_wrong_result_is_not_timed_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "attend64", lambda *a: 2 * attend64(*a))
    done = kvk("--quick", "--filter", "decode/k4v4/4096", "--json")
    assert done.exit_code == 1
    (line,) = lines(done)
    assert line["outcome"] == "wrong"
    assert line["median_s"] is None


def test_broken_guards_are_retried_and_then_end_with_1(tmp_path: Path) -> None:
    path = tmp_path / "guards.toml"
    path.write_text('[ratio]\n"transient/q256-n2048 vs transient/q128-n1024" = 99.0\n')
    done = kvk("--quick", "--filter", "bytes/transient", "--guard", "--guards", path)
    assert done.exit_code == 1
    assert done.stderr.count("timing those again") == 2
    assert "guard broken" in done.stderr
