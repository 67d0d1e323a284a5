"""The cases of standard types, tails and kinds of windows: which there are, what they count, and
that the model answers them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cache_tools import model_by_rules, spec

from kvkernels.cpu.reference_attend import visible
from kvkernels.op import STANDARD_TYPES, TAIL_DTYPES
from kvkernels.records.layout import BITS, GROUP
from kvkernels.testing import inputs
from kvkernels.testing.case import Case, span
from kvkernels.testing.cases import by_id, cases, select

NEW = ("standard", "tail", "native-exact", "chunked", "symmetric", "noncausal")
QUICK = [c for c in select(quick=True) if c.id.partition("/")[0] in NEW and c.n_ctx < 500]


@pytest.mark.parametrize("kind", ["sliding", "chunked", "symmetric"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 7, 8, 40])
def test_span_is_what_is_visible(kind: str, causal: bool, window: int | None) -> None:
    layer = spec(
        window=window, window_kind=kind if window else "sliding", causal=causal, k="f16", v="f16"
    )
    see = visible(
        np.arange(30), np.arange(30), causal=causal, window=window, window_kind=layer.window_kind
    )
    for i in range(30):
        first, stop = span(layer, i, 30)
        assert np.flatnonzero(see[i]).tolist() == list(range(first, stop))


def test_every_pair_is_asked_A1() -> None:
    by_family: dict[str, set[Any]] = {}
    for case in cases():
        s = case.layer
        if case.must_be == "native":
            by_family.setdefault(case.id.partition("/")[0], set()).add((s.k, s.v, s.tail_dtype))
    records = {(f"kvarn{k}", f"kvarn{v}") for k in BITS for v in BITS}
    standard = {(k, v) for k in STANDARD_TYPES for v in STANDARD_TYPES}
    assert {(k, v, None) for k, v in standard} <= by_family["standard"]
    assert {(k, v, d) for k, v in records | standard for d in TAIL_DTYPES} <= by_family["tail"]


def test_bytes_and_flops_by_hand() -> None:
    def case(n_kv: int, n_q: int, **changes: Any) -> Case:
        base = by_id("decode/k4v4/d128/h8x4/kv4096/q1")
        layer = dataclasses.replace(base.layer, **changes)
        return dataclasses.replace(base, layer=layer, past=(n_kv - n_q,), n_q=(n_q,))

    now = 4 * (4 * 256 + 8 * 256)  # a current row, a query row and its result, float32
    record = 2 * (2048 * 4 + 768)
    # 3840 past rows, of which 255 are the tail's and 3585 lie in 29 groups.
    assert case(3841, 1, tail=200).bytes == now + 4 * (255 * 512 + 29 * record)
    assert case(3841, 1, tail=200).flops == 4 * 3841 * 8 * 128
    # The stage serves 128 rows: no ring.
    assert case(3841, 1, tail=100).bytes == case(3841, 1).bytes == now + 4 * 30 * record
    # A window that is covered: no records.
    assert case(1000, 1, tail=150, window=150).bytes == now + 4 * 149 * 512
    assert case(1000, 1, tail=150, window=150).flops == 4 * 150 * 8 * 128
    plain: dict[str, Any] = {"k": "q8_0", "v": "f16", "head_dim_v": 64}
    row = 128 // 32 * 34 + 64 * 2
    now = 4 * (4 + 8) * 192
    assert case(1000, 3, **plain).bytes == 3 * now + 4 * 997 * row
    assert case(1000, 3, **plain).flops == 2 * (998 + 999 + 1000) * 8 * 192
    assert case(1000, 3, tail=51, **plain).bytes == 3 * now + 4 * (50 * 384 + 947 * row)
    chunked = case(1000, 3, window=90, window_kind="chunked", **plain)
    # 997, 998 and 999 lie in the chunk from 990 on.
    assert chunked.bytes == 3 * now + 4 * 7 * row
    assert chunked.flops == 2 * (8 + 9 + 10) * 8 * 192
    assert case(1000, 3, causal=False, **plain).flops == 2 * 3 * 1000 * 8 * 192


@pytest.mark.parametrize("case", QUICK, ids=lambda c: c.id)
def test_the_model_answers(case: Case) -> None:
    """Every visible row is scored exactly once (the model says so itself), and a row that sees
    nothing is 0.
    """
    for i, data in enumerate(inputs.of_case(case)):
        model = model_by_rules(case.layer, case.n_ctx + 2 * GROUP, 1)
        for start, stop in inputs.cuts(case.past[i], 512, case.id, i):
            q, k, v = data.part(start, stop)
            model.append(k, v, q)
        mask, part = inputs.mask(case, i), data.part(case.past[i])
        out = model.attend(*part, mask=mask, sink_logits=inputs.sink_logits(case))
        assert out.shape == (case.n_q[i], case.layer.n_head, case.layer.head_dim_v)
        assert np.isfinite(out).all()
        if mask is None:
            assert out.any(axis=-1).all()


def test_masks_with_gaps_in_the_newest_rows() -> None:
    case = by_id("tail/k5v4/d64/h4x2/kv700/q40/tail256/hidden-newest")
    see = inputs.mask(case, 0)
    assert see[:, :560].all()
    assert see[:, 660:].all()
    assert 0.4 < see[:, 560:660].mean() < 0.6
    assert (see[0] != see[1]).any()
    heads = inputs.mask(by_id("tail/k5v4/d64/h4x2/kv700/q40/tail256/sparse-heads"), 0)
    assert heads.shape == (4, 40, 700)
    assert 0.55 < heads.any(0).mean() < 0.65
