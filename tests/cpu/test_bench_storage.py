"""Benches of tails, standard types and plans: quick fills, their references, and what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvkernels.backend import Device
from kvkernels.bench import contents, contest, fill, footprint, peers, storage, tournament
from kvkernels.bench.against import OWN, Checked, against
from kvkernels.bench.measure import Effort, measure
from kvkernels.bench.report import Result
from kvkernels.bench.workload import Rows, filled, relative_error
from kvkernels.op import LayerSpec
from kvkernels.testing.model import model_of

QUICK = Effort(rounds=3, least_s=0.0, warmup=0)
KVARN = LayerSpec(n_head=4, n_kv_head=2, head_dim=64, k="kvarn5", v="kvarn3", encoder="published")
TAIL = replace(KVARN, tail=384)
STANDARD = LayerSpec(n_head=4, n_kv_head=2, head_dim=64, k="q8_0", v="q4_1")
MIXED = LayerSpec(n_head=4, n_kv_head=2, head_dim=64, k="f16", v="q5_0", tail=200)
SPECS = (TAIL, STANDARD, MIXED, replace(TAIL, tail_dtype="bf16"))


def repeated(spec: LayerSpec, past: int) -> tuple[Rows, Rows]:
    """One period, and as many rows of its repetition."""
    rows = fill.period(spec)
    return rows, Rows(*(contents.taken(getattr(rows, x), 0, past) for x in "qkv"))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("past", [11 * 128 + 37, 18 * 128])
def test_a_copied_fill_is_the_real_fill(device: Device, spec: LayerSpec, past: int) -> None:
    rows, whole = repeated(spec, past)
    quick = fill.repeated(spec, device, rows, past).cache
    slow = filled(spec, device, whole, past)
    for name in ("k_records", "v_records", "k_ring", "v_ring"):
        found, real = (getattr(c.buffers[0], name) for c in (quick, slow))
        np.testing.assert_array_equal(found, real)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_references_of_a_filled_cache(device: Device, spec: LayerSpec) -> None:
    past = 1300
    rows, whole = repeated(spec, past)
    made = fill.repeated(spec, device, rows, past, activations="f32")
    assert relative_error(made.once(3)(), made.expected(3)) < 1e-4
    model = model_of(spec, made.cache.plan.tails[0])
    for start in range(0, past, 512):
        model.append(*(x[start : start + 512] for x in (whole.k, whole.v)))
    new = [contents.taken(getattr(rows, x), past, 3) for x in "qkv"]
    assert relative_error(made.expected(3), model.attend(*new)) < 1e-9


def test_tail_bench(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = storage.tail(2048, rows=256)(device, QUICK)
    assert (found.case, found.baseline) == ("tail/k4v4-d128-h8g4-n2048", "no-tail")
    assert (found.entry, found.route) == ("cpu/attend_decode", "native")
    assert found.outcome in ("ok", "miss")
    assert found.ratio is not None
    assert found.error is not None
    assert found.error < 3e-2
    # A reference without the tail is what a kernel that ignores it would compute.
    monkeypatch.setattr(contents, "_fill_tail", lambda *a: None)
    (wrong,) = storage.tail(2048, rows=1024)(device, QUICK)
    assert (wrong.outcome, wrong.median_s) == ("wrong", None)
    assert wrong.note.startswith("own is off by")


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_standard_bench(device: Device, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    found = {x.baseline: x for x in storage.standard(kind, 2048)(device, QUICK)}
    assert found.keys() == {"torch-bf16-folded", "numpy-f32"}
    lost = found["torch-bf16-folded"]
    assert (lost.note, lost.ratio) == ("not installed: pip install torch", None)
    assert found["numpy-f32"].case == f"standard/{kind}-d128-h8g4-n2048"
    assert found["numpy-f32"].ratio is not None
    assert found["numpy-f32"].outcome in ("ok", "miss")


def test_standard_bench_with_torch(device: Device) -> None:
    pytest.importorskip("torch")
    found = {x.baseline: x for x in storage.standard("q8_0", 2048)(device, QUICK)}
    assert found.keys() == {"torch-bf16-folded", "numpy-f32"}
    assert all(x.ratio is not None for x in found.values())


def test_plan_bench(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = storage.model()
    assert [i for i, x in enumerate(layers) if x.window is None] == list(range(5, 64, 6))
    (found,) = storage.plan_time(device, QUICK)
    assert (found.case, found.error) == ("plan/64-layers", 0.0)
    assert found.note.startswith("2 cache groups")
    monkeypatch.setattr(storage, "_LAYERS", 65)
    monkeypatch.setattr(storage, "model", lambda: layers)
    (wrong,) = storage.plan_time(device, QUICK)
    assert (wrong.outcome, wrong.median_s) == ("wrong", None)


def test_bytes_of_every_kind_of_body(device: Device) -> None:
    found = {x.case.split("-d128")[0]: x for x in footprint.persistent(device, QUICK)}
    assert {x.outcome for x in found.values()} == {"ok"}
    assert {"bytes/q8_0", "bytes/bf16", "bytes/k4v4-tail1000"} <= found.keys()
    # 512 rows and one to roll back, K in vectors of 64 tokens: no body besides.
    exact = found["bytes/k4v4-window512-tail512"]
    assert exact.value == 8 * 128 * 2 * (576 + 513)
    assert exact.note == "a ring and no body"


def test_against_checks_before_it_times() -> None:
    ones, base = np.ones((1, 2)), Result(case="c", device="cpu:0")

    def call(value: float) -> Any:
        return Checked(lambda: value * ones[0], ones, 1e-3, least=0.0)

    (good,) = against(base, {OWN: call(1.0), "other": call(1.0)}, QUICK)
    assert (good.baseline, good.outcome, good.error) == ("other", "ok", 0.0)
    (hard,) = against(
        base, {OWN: call(1.0), "other": replace(call(1.0), least=float("inf"))}, QUICK
    )
    assert hard.outcome == "miss"
    (wrong,) = against(base, {OWN: call(1.0), "other": call(2.0)}, QUICK)
    assert (wrong.outcome, wrong.ratio, wrong.error) == ("wrong", None, 1.0)
    assert wrong.note.startswith("other is off by")


def test_a_pause_before_every_timing() -> None:
    seen: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvkernels.bench.measure.time.sleep", seen.append)
        measure({"a": lambda: None, "b": lambda: None}, replace(QUICK, rest_s=0.5))
    assert seen == [0.5] * 6


def test_the_contest_has_tails_and_standard_types() -> None:
    plan, rows = contest.Plan(1, (1024,), quick=True), fill.period(contest.layer())
    found = {row.name: (row, wanted) for row, wanted, _ in contest.own_rows(plan, rows, 1024)}
    for name in ("kvk-q8_0", "kvk-q4_0", "kvk-k4v4-tail1024"):
        row, wanted = found[name]
        assert row.call is not None
        assert relative_error(row.call(), wanted) <= row.limit


def test_their_required_ratios() -> None:
    def line(baseline: str, ratio: float) -> dict[str, Any]:
        case = "peers/decode-n32768-t2"
        made = {"ratio": ratio, "ratio_of_minima": ratio, "value": 1.0, "note": ""}
        return {"case": case, "baseline": baseline, **made}

    lines = [line("torch-bf16-folded", 6.0), line("kvk-q8_0", 1.5), line("kvk-q4_0", 3.0)]
    lines.append(line("kvk-k4v4-tail1024", 1.2))
    found = {x["target"]: x for x in tournament.floors(lines)}
    folded = found["torch-bf16-folded / kvk-q8_0 >= 3"]
    assert (folded["value"], folded["outcome"]) == (4.0, "ok")
    assert found["torch-bf16-folded / kvk-q4_0 >= 3"]["outcome"] == "miss"
    assert found["kvk-k4v4-tail1024 / kvk-k4v4 <= 1.15"]["outcome"] == "miss"
