"""Attention on the emulator: against the float64 model, and what its bits must not depend on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from attention import again, recorded, replay, run
from numpy.testing import assert_array_equal

from kvkernels.records.layout import BITS
from kvkernels.simt import attend as attending
from kvkernels.simt.device import SimtDevice
from kvkernels.simt.emulator.driver import ORDERS, EmulatorDriver
from kvkernels.testing import parity
from kvkernels.testing.cases import Case, select

PAIRS = select("decode/*/d64/h4x2/kv300/q1")
OTHERS = (
    *select("decode/*/q3", quick=True),  # head dims 128, 256, 512
    *select("prefill/k[358]v[358]/d64/*", quick=True),
    *select("length/*/kv1/*", quick=True),
    *select("length/*/kv129/q[13]", quick=True),
    *select("softcap/*/h12x4/*/q3/*"),
    *select("mask/*/d64/*/q3/add-heads"),
    *select("tail/k5v4/d64/h4x2/kv257/q[14]*/tail256/short"),
    *select("tail/q8_0-q5_0/d128v96/*"),
    *select("tail/k5v4/*/kv300+129+700/*"),
    *select("native-exact/k5v4/*/kv300/q1/tail4096bf16"),
    *select("symmetric/*", quick=True)[:1],
    *select("chunked/*", quick=True)[:1],
    *select("standard/q4_0-q5_1/d192v128/*"),
    *select("standard/bf16-q4_1/d96/*"),
)


def check(device: Any, case: Case) -> None:
    assert [r.to_json() for r in parity.run_all(device, case) if not r.passed] == []


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: case.id)
def test_F08_every_pair_of_widths(device: SimtDevice, case: Case) -> None:
    result = parity.run_case(device, case)
    assert result.passed, result
    assert result.entry == "simt/attend_portable"


def test_F08_no_pair_is_missing() -> None:
    layers = [case.layer for case in PAIRS]
    assert {(x.k_bits, x.v_bits) for x in layers} == {(k, v) for k in BITS for v in BITS}


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.id)
def test_others(device: SimtDevice, case: Case) -> None:
    check(device, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [c for c in select(quick=True) if c not in OTHERS], ids=lambda case: case.id
)
def test_all(device: SimtDevice, case: Case) -> None:
    check(device, case)


# --- what bits must not depend on

RECORDS = "decode/k3v5/d128/h4x2/kv300/q3"
WINDOW = "window/k4v4/d64/h4x2/kv1000/q200/w60"
TILES = "standard/q5_1-f16/d64/h12x2/kv300/q3/alibi8"
RING = "tail/k5v4/d64/h4x2/kv700/q3/tail256/add-heads"
COMPANY = (
    "batch/k4v4/d64/h4x2/kv1+33+97+128+129+192/q1",
    "batch/k4v4/d64/h4x2/kv500+700+200/q1+40+2/w150",
    "tail/q8_0-q4_0/d64/h4x2/kv300+129+700/q1+17+3/tail50",
)


@pytest.mark.parametrize("case_id", [RECORDS, WINDOW, TILES, RING])
def test_F34_not_on_the_order_of_threads_nor_on_lanes(driver: EmulatorDriver, case_id: str) -> None:
    result = replay(case_id)
    expected = result(driver)
    for order in ORDERS:
        for lanes in (32, 64):
            driver.arrange(order, seed=3, lanes=lanes)
            assert result(driver) == expected, (order, lanes)


@pytest.mark.parametrize("case_id", COMPANY)
def test_B7_not_on_the_company(driver: EmulatorDriver, case_id: str) -> None:
    call, prefill = recorded(case_id)
    assert len(call.batch.views) > 1 or prefill
    together = run(driver, again(call), prefill=prefill)
    for view in call.batch.views:
        alone = run(driver, again(call, [view]), prefill=prefill)
        mine = slice(view.q_start, view.q_start + view.n_q)
        for one, all_ in zip(alone, together, strict=True):
            assert_array_equal(one[mine], all_[mine])
            assert not np.isnan(one[mine]).any()
            others = np.ones(len(one), bool)
            others[mine] = False
            assert np.isnan(one[others]).all()  # nobody else's rows are written


@pytest.mark.parametrize("case_id", [RECORDS, TILES, RING])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_B7_not_on_the_rows_that_a_block_takes(
    driver: EmulatorDriver, monkeypatch: pytest.MonkeyPatch, case_id: str, rows: int
) -> None:
    call, prefill = recorded(case_id)
    assert not prefill
    expected = run(driver, again(call), prefill=False)
    monkeypatch.setattr(attending, "block_rows", lambda *_, **__: rows)
    found = run(driver, again(call), prefill=False)
    for one, other in zip(found, expected, strict=True):
        assert_array_equal(one, other)


def test_B7_a_query_alone_is_the_query_among_others(driver: EmulatorDriver) -> None:
    """The first of several, as a step of its own: it sees the same keys, in a smaller block."""
    call, _ = recorded(RECORDS)
    together = run(driver, again(call), prefill=False)
    (view,) = call.batch.views
    assert view.n_q == 3
    first = dataclasses.replace(view, n_q=1)
    alone = run(driver, again(call, [first]), prefill=False)
    for one, other in zip(alone, together, strict=True):
        assert_array_equal(one[:1], other[:1])


def test_results_are_written_whatever_was_there(driver: EmulatorDriver) -> None:
    call, _ = recorded("masked/k4v4/d128/h4x2/kv420/q16/hidden-all")
    out, lse = run(driver, again(call), prefill=False)
    assert not out.any()
    assert np.isneginf(lse).all()
