"""What `kvk bench --peers` is made of: quick fills, C yardstick, absent peers, required ratios."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvkernels.backend import Device
from kvkernels.bench import contest, fill, pages, peers, tournament, yardstick
from kvkernels.bench.measure import Effort, measure
from kvkernels.bench.report import Result
from kvkernels.bench.workload import Rows, filled, relative_error
from kvkernels.cli import main
from kvkernels.errors import InputError
from kvkernels.op import LayerSpec

SMALL = LayerSpec(n_head=4, n_kv_head=2, head_dim=64, k="kvarn5", v="kvarn3", encoder="published")
WIDE = LayerSpec(n_head=8, n_kv_head=2, head_dim=128, k="kvarn4", v="kvarn4", encoder="published")


def test_a_copied_fill_is_the_real_fill_of_repeating_rows(device: Device) -> None:
    rows, past = fill.period(SMALL), 11 * 128 + 37
    at = np.arange(past + 1) % fill.PERIOD
    whole = Rows(rows.q[at], rows.k[at], rows.v[at])
    quick = fill.repeated(SMALL, device, rows, past)
    slow = filled(SMALL, device, whole, past)
    for name in ("k_records", "v_records"):
        found, real = (getattr(c.buffers[0], name) for c in (quick.cache, slow))
        np.testing.assert_array_equal(found, real)
    step = slow.step({0: 1})
    np.testing.assert_array_equal(
        quick.once()(), step.attend(0, *(x[past:] for x in whole_of(whole)))
    )
    step.discard()


def whole_of(rows: Rows) -> tuple[Any, ...]:
    return rows.q, rows.k, rows.v


def test_references_of_a_filled_cache(device: Device) -> None:
    made = fill.repeated(SMALL, device, fill.period(SMALL), 1300, activations="f32", room=64)
    assert relative_error(made.once(4)(), made.expected(4)) < 1e-4
    assert relative_error(made.launch_call()().reshape(1, 4, 64), made.expected()) < 1e-4
    assert relative_error(made.past_call(40)()[3:9], made.expected_past(40, slice(3, 9))) < 1e-4


@pytest.mark.parametrize("build", yardstick.BUILDS)
@pytest.mark.parametrize("wide", [True, False])
def test_the_yardstick_computes_attention(device: Device, build: str, wide: bool) -> None:
    if isinstance(found := yardstick.library(build), str):
        pytest.skip(found)
    rows = fill.period(WIDE)
    records = yardstick.whole_groups(fill.repeated(WIDE, device, rows, 2047).cache, 2048)
    assert records.k.shape == (2, 16, 8960)
    q = np.ascontiguousarray(rows.q[5])
    expected = fill.attend_heads(WIDE, q[None], records.heads())[0]
    for threads in (1, 2):
        out = yardstick.decode_call(build, records, q, threads, wide=wide)()
        assert relative_error(out, expected) < 3e-2


def test_reads_work_with_and_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    call, _ = yardstick.read_call(1 << 17, 2)
    assert call() is not None
    monkeypatch.setattr(yardstick, "compiler", lambda: None)
    yardstick.library.cache_clear()
    try:
        call, how = yardstick.read_call(1 << 17, 2)
        assert "NumPy" in how
        assert call() is not None
        task = small_task()
        notes = {row.note for row in peers.yardstick_rows(task, None)}  # type: ignore[arg-type]
        assert all(notes)
    finally:
        yardstick.library.cache_clear()


def small_task() -> peers.Task:
    rows = fill.period(SMALL)
    q = np.ascontiguousarray(rows.q[0].reshape(2, 2, 64))
    return peers.Task(SMALL, q, fill.tokens(rows.k, 600), fill.tokens(rows.v, 600), 1)


def test_what_is_not_installed_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    task = small_task()
    rows = [*peers.torch_rows(task), *peers.transformers_rows(task)]
    assert {row.call for row in rows} == {None}
    assert all(row.note.startswith("not installed: pip install ") for row in rows)
    assert {"torch-bf16-folded", "hf-quanto-4bit", "hf-hqq-4bit"} <= {row.name for row in rows}


def test_numpy_peers_compute_attention() -> None:
    task = small_task()
    pairs = [
        (k.astype(float), v.astype(float)) for k, v in zip(task.keys, task.values, strict=True)
    ]
    flat = task.q.reshape(1, 4, 64)
    exact = fill.attend_heads(SMALL, flat, pairs)[0]
    for row in peers.numpy_rows(task):
        assert row.call is not None
        assert relative_error(row.call(), exact) <= row.limit
    windows = next(iter(peers.prefill_rows(task, task.q)))
    assert windows.call is not None
    assert relative_error(windows.call().reshape(4, 64), exact) <= windows.limit


@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
def test_torch_peers_compute_attention() -> None:
    task = small_task()
    pairs = [
        (k.astype(float), v.astype(float)) for k, v in zip(task.keys, task.values, strict=True)
    ]
    exact = fill.attend_heads(SMALL, task.q.reshape(1, 4, 64), pairs)[0]
    for row in peers.torch_rows(task):
        assert row.call is not None
        assert relative_error(row.call().reshape(4, 64), exact) <= row.limit


def test_long_calls_are_timed_in_fewer_rounds() -> None:
    effort = Effort(rounds=9, warmup=1, cold=True, long_s=-1.0)
    assert len(measure({"a": lambda: None}, effort)["a"].seconds) == 3


def test_a_wrong_peer_is_not_timed() -> None:
    rows = [peers.Row(contest.OWN, lambda: np.ones((1, 2)), 1e-3)]
    rows += [peers.Row("bad", lambda: np.zeros((1, 2)), 1e-3), peers.Row("gone", note="why")]
    expected = {contest.OWN: np.ones((1, 2)), "bad": np.ones((1, 2))}
    base = Result(case="peers/decode-n1-t1", device="cpu:0", entry=contest.OWN)
    plan = contest.Plan(1, (1,), quick=True)
    found = {r.baseline: r for r in contest._timed(base, rows, expected, plan)}
    assert (found["bad"].outcome, found["bad"].median_s) == ("wrong", None)
    assert (found["gone"].note, found[contest.OWN].ratio) == ("why", 1.0)


def line(case: str, baseline: str, **values: Any) -> dict[str, Any]:
    load = {"load1": 1.0, "spin": 1.0}
    made = Result(case=f"peers/{case}", device="cpu:0", entry=contest.OWN, baseline=baseline)
    return (
        made.to_json(*[contest.machine_load(1)] * 2)
        | {"load": {"before": load, "after": load}}
        | values
    )


RUN = [
    line("decode-n4096-t1", contest.OWN, value=1e-3, ratio=1.0, baseline_error=2e-2),
    line(
        "decode-n4096-t1",
        "torch-bf16-folded",
        value=5e-3,
        ratio=5.0,
        ratio_of_minima=3.0,
        baseline_min_s=3e-3,
    ),
    line("decode-n4096-t1", f"{contest.OWN}-launch", value=9e-4, ratio=0.9, ratio_of_minima=0.4),
    line("decode-n4096-t1", "c-avx2-i16", value=1e-3, ratio=0.5, ratio_of_minima=0.5),
    line("decode-n4096-t1", "hf-hqq-4bit", note="not installed: pip install hqq"),
    line("decode-n32768-t1", "torch-bf16-folded", value=5e-3, ratio=5.0),
    line("encode-tile-k-t1", "published", value=9e-5),
]


def test_required_ratios() -> None:
    found = {(x["case"], x["target"]): x for x in tournament.floors(RUN)}
    small, large = "floor/decode-n4096-t1", "floor/decode-n32768-t1"
    folded = found[small, "torch-bf16-folded / ours >= 4"]
    assert (folded["outcome"], folded["note"]) == ("ok", "best rounds say miss")
    assert found[large, "torch-bf16-folded / ours >= 6"]["outcome"] == "miss"
    in_c = found[small, "ours / C with intrinsics <= 1.2"]
    assert (in_c["baseline"], in_c["value"], in_c["outcome"]) == ("c-avx2-i16", 2.0, "miss")
    launch = found[small, "our launch / C <= 1.2"]
    assert (launch["value"], launch["by_minima"], launch["outcome"]) == (1.8, 0.8, "miss")
    assert found[large, "our launch / C <= 1.2"]["outcome"] == "info"
    assert found[small, "error, int8 PV <= 0.015"]["outcome"] == "miss"
    lost = found[small, "hf-hqq-4bit / ours >= 25"]
    assert (lost["outcome"], lost["note"]) == ("info", "not installed: pip install hqq")
    tile = found["floor/encode-tile-k-t1", "published encoder, k tile, s <= 0.0001"]
    assert tile["outcome"] == "ok"


def test_pages_of_an_earlier_run(tmp_path: Path) -> None:
    source, target = tmp_path / "run.json", tmp_path / "a" / "run.md"
    source.write_text("\n".join(map(json.dumps, [*RUN, *tournament.floors(RUN)])))
    args = ["bench", "--peers", "--from", str(source), "--json", "--markdown", str(target)]
    done = CliRunner().invoke(main, args, catch_exceptions=False)
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) == len(RUN) + len(tournament.floors(RUN))
    text = target.read_text()
    assert "not installed: pip install hqq" in text
    assert "## Required" in text
    with pytest.raises(InputError):
        tournament.read('{"schema": "other"}')
    if find_spec("matplotlib") is None:
        with pytest.raises(InputError, match="matplotlib"):
            pages.plot(RUN, tmp_path / "x.png", "")
    else:
        pages.plot(RUN, tmp_path / "x.png", "")
        assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize("args", [("--threads", "x"), ("--n-kv", "1000")])
def test_wrong_numbers_are_refused(args: tuple[str, str]) -> None:
    assert CliRunner().invoke(main, ["bench", "--peers", *args]).exit_code == 2


@pytest.mark.slow
def test_the_contest_runs(tmp_path: Path) -> None:
    args = ["bench", "--peers", "--quick", "--threads", "1", "--n-kv", "1024", "--json"]
    done = CliRunner().invoke(main, args, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    found = [json.loads(x) for x in done.stdout.splitlines()]
    assert {x["schema"] for x in found} == {"kvk.bench/1"}
    assert not tournament.wrong(found)
    names = {x["baseline"] for x in found}
    assert {contest.OWN, "numpy-f32", "torch-bf16-folded", "c-avx2-i16", "read-f16"} <= names
