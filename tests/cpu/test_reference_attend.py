"""The attention reference against formulas written out here (semantics B1-B6; F13, F14, F17)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvkernels.cpu.reference import alibi_slopes, attend, rotate, visible
from kvkernels.errors import InputError


def make(
    n_q: int = 5, n_kv: int = 40, n_head: int = 4, n_kv_head: int = 2, d: int = 64, gain: float = 1
) -> dict[str, Any]:
    rng = np.random.default_rng(n_q + n_kv + n_head)
    return {
        "q": rng.normal(size=(n_q, n_head, d)) * gain,
        "k": rng.normal(size=(n_kv, n_kv_head, d)) * gain,
        "v": rng.normal(size=(n_kv, n_kv_head, d)),
        "scale": d**-0.5,
        "q_pos": np.arange(n_kv - n_q, n_kv),
        "k_pos": np.arange(n_kv),
    }


def dense(a: dict[str, Any], score: Any) -> Any:
    """Softmax over complete scores [n_head, n_q, n_kv]; -inf is invisible, every row sees one."""
    gqa = a["q"].shape[1] // a["k"].shape[1]
    v = np.repeat(a["v"], gqa, axis=1)
    p = np.exp(score - score.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v)


def raw_scores(a: dict[str, Any]) -> Any:
    gqa = a["q"].shape[1] // a["k"].shape[1]
    return a["scale"] * np.einsum("ihd,jhd->hij", a["q"], np.repeat(a["k"], gqa, axis=1))


def hide(score: Any, see: Any) -> Any:
    return np.where(see, score, -np.inf)


def causal(a: dict[str, Any]) -> Any:
    return a["k_pos"][None, :] <= a["q_pos"][:, None]


def test_B2_plain_causal_attention_with_gqa() -> None:
    for n_kv_head in (1, 2, 4):
        a = make(n_kv_head=n_kv_head)
        assert np.allclose(attend(**a), dense(a, hide(raw_scores(a), causal(a))), atol=1e-14)


def test_A4_gqa_must_be_integral() -> None:
    with pytest.raises(InputError, match="n_head: found 4; needed a multiple of n_kv_head = 3"):
        attend(**make(n_kv_head=3))
    a = make()
    with pytest.raises(InputError, match="k, v"):
        attend(**{**a, "v": a["v"][:-1]})


def test_B1_F17_softcap_comes_before_the_bias() -> None:
    a = make(n_head=8, d=128, gain=4)
    cap, max_bias = 30.0, 8.0
    distance = np.abs(a["q_pos"][:, None] - a["k_pos"][None, :])
    bias = -alibi_slopes(8, max_bias)[:, None, None] * distance
    raw = raw_scores(a)
    assert np.abs(raw).max() > cap  # large enough that the cap bites
    got = attend(**a, softcap=cap, alibi_max_bias=max_bias)
    want = dense(a, hide(cap * np.tanh(raw / cap) + bias, causal(a)))
    wrong = dense(a, hide(cap * np.tanh((raw + bias) / cap), causal(a)))
    assert np.allclose(got, want, atol=1e-13)
    assert np.abs(got - wrong).max() > 1e-2
    assert np.abs(got - dense(a, hide(raw + bias, causal(a)))).max() > 1e-2  # cap not ignored


def test_B1_alibi_slopes_for_12_heads() -> None:
    slopes = alibi_slopes(12, 8.0)
    assert slopes[:8] == pytest.approx([2.0 ** -(h + 1) for h in range(8)])
    assert slopes[8:] == pytest.approx([2.0 ** -(h + 0.5) for h in range(4)])
    assert alibi_slopes(12, 0.0).tolist() == [1.0] * 12
    assert alibi_slopes(8, 8.0) == pytest.approx(slopes[:8])


def test_B1_alibi_with_12_heads() -> None:
    a = make(n_head=12, n_kv_head=4)
    distance = a["q_pos"][:, None] - a["k_pos"][None, :]
    slopes = [2.0 ** -(h + 1) for h in range(8)] + [2.0 ** -(h + 0.5) for h in range(4)]
    score = raw_scores(a) - np.array(slopes)[:, None, None] * distance
    got = attend(**a, alibi_max_bias=8.0)
    assert np.allclose(got, dense(a, hide(score, causal(a))), atol=1e-13)
    # The short formula is right only when n_head is a power of two.
    naive = np.array([2.0 ** (-8 * (h + 1) / 12) for h in range(12)])
    wrong = raw_scores(a) - naive[:, None, None] * distance
    assert np.abs(got - dense(a, hide(wrong, causal(a)))).max() > 1e-2


@pytest.mark.parametrize("window", [1, 2, 7, 100])
def test_B4_window_counts_the_query_itself(window: int) -> None:
    a = make()
    i, j = a["q_pos"][:, None], a["k_pos"][None, :]
    see = (i - window < j) & (j <= i)
    assert see.sum(1).tolist() == [min(window, int(p) + 1) for p in a["q_pos"]]
    got = attend(**a, window=window)
    assert np.allclose(got, dense(a, hide(raw_scores(a), see)), atol=1e-14)
    if window == 1:  # the query sees itself only
        assert np.allclose(got, np.repeat(a["v"][-5:], 2, axis=1), atol=1e-15)


def test_B4_positions_not_indices_decide() -> None:
    a = make()
    shuffle = np.random.default_rng(0).permutation(40)
    moved = {**a, "k": a["k"][shuffle], "v": a["v"][shuffle], "k_pos": a["k_pos"][shuffle]}
    assert np.allclose(attend(**moved, window=9), attend(**a, window=9), atol=1e-14)
    i, j = a["q_pos"][:, None], a["k_pos"][None, :]
    see = visible(a["q_pos"], a["k_pos"], causal=False, window=3)
    assert np.array_equal(see, np.abs(i - j) < 3)  # symmetric without causal
    assert not visible([5], [-1, 3, 5, 6])[0, [0, 3]].any()  # unused row, future row


def test_B4_masks_bool_and_additive_broadcast_over_heads_with_any_stride() -> None:
    a = make()
    rng = np.random.default_rng(1)
    keep = rng.random((5, 40)) < 0.6
    keep[:, 0] = True
    bias = rng.normal(size=(4, 40, 5)).transpose(0, 2, 1)  # not contiguous
    score = raw_scores(a)
    want = dense(a, hide(score, keep & causal(a)))
    assert np.allclose(attend(**a, mask=keep), want, atol=1e-14)
    assert np.allclose(attend(**a, mask=np.where(keep, 0.0, -np.inf)), want, atol=1e-14)
    assert np.allclose(attend(**a, mask=bias), dense(a, hide(score + bias, causal(a))), atol=1e-14)
    assert not np.allclose(attend(**a, mask=bias), attend(**a))
    one = attend(**a, mask=np.array(True))
    assert np.array_equal(one, attend(**a))


def test_B1_additive_mask_is_outside_the_cap_and_not_scaled_by_slopes() -> None:
    a = make(gain=4)
    bias = np.random.default_rng(2).normal(size=(5, 40)) * 5
    slopes = alibi_slopes(4, 8.0)[:, None, None]
    distance = a["q_pos"][:, None] - a["k_pos"][None, :]
    score = 5 * np.tanh(raw_scores(a) / 5) - slopes * distance + bias
    got = attend(**a, softcap=5.0, alibi_max_bias=8.0, mask=bias)
    assert np.allclose(got, dense(a, hide(score, causal(a))), atol=1e-13)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_B3_F13_rows_that_see_nothing_are_exactly_zero(d: int, sinks: bool) -> None:
    a = make(n_q=32, n_kv=32, d=d)
    logits = np.array([0.3, -2.0, 50.0, -np.inf]) if sinks else None
    dark = [*range(14), 15, 31]
    mask = np.zeros((32, 32))
    mask[dark] = -np.inf
    mask[20, :16] = -np.inf  # its first tile is hidden, a later key is visible
    got, lse = attend(**a, mask=mask, sink_logits=logits, return_lse=True)
    clean = attend(**a, sink_logits=logits)
    assert (got[dark] == 0).all()
    assert np.isfinite(got).all()
    lit = [i for i in range(32) if i not in dark and i != 20]
    assert np.array_equal(got[lit], clean[lit])
    assert np.abs(got[20]).min() > 0
    floor = logits if sinks else np.full(4, -np.inf)
    assert np.array_equal(lse[dark], np.broadcast_to(floor, (16, 4)))
    assert (attend(**a, mask=np.full((32, 32), -np.inf), sink_logits=logits) == 0).all()


def test_B2_sink_logits_enter_the_denominator_only() -> None:
    a = make()
    sinks = np.array([0.5, -1.0, 3.0, 20.0])
    plain, lse = attend(**a, return_lse=True)
    got, with_sinks = attend(**a, sink_logits=sinks, return_lse=True)
    share = np.exp(lse) / (np.exp(lse) + np.exp(sinks))
    assert np.allclose(got, plain * share[..., None], atol=1e-14)
    assert np.allclose(with_sinks, np.logaddexp(lse, sinks), atol=1e-13)


def test_B5_F14_nan_in_rows_that_are_not_visible_does_not_leak() -> None:
    for used in (1, 32, 96, 127, 128, 129, 191):
        a = make(n_q=1, n_kv=192)
        a["q_pos"] = np.array([used - 1])
        clean = attend(**a)
        dirty = {**a, "k": a["k"].copy(), "v": a["v"].copy()}
        dirty["k"][used:] = np.nan
        dirty["v"][used:] = np.nan
        assert np.array_equal(attend(**dirty), clean)
        unused = {
            **dirty,
            "q_pos": np.array([191]),
            "k_pos": np.where(np.arange(192) < used, 0, -1),
        }
        assert np.isfinite(attend(**unused)).all()


def test_B5_F14_nan_visible_to_one_query_stays_with_that_query() -> None:
    a = make()
    dirty = {**a, "v": a["v"].copy(), "k": a["k"].copy()}
    dirty["v"][38] = np.nan
    dirty["k"][39] = np.nan
    got, clean = attend(**dirty), attend(**a)
    assert np.array_equal(got[:3], clean[:3])
    assert np.isnan(got[3]).all()
    assert np.isnan(got[4]).all()
    per_head = np.ones((4, 1, 40), bool)
    per_head[:2, :, 38:] = False  # heads 0 and 1 do not see the poisoned rows
    got = attend(**dirty, mask=per_head)
    assert np.isfinite(got[:, :2]).all()
    assert np.isnan(got[4, 2:]).all()


def test_B6_partial_results_merge_by_lse() -> None:
    a = make()
    whole, lse = attend(**a, return_lse=True)
    halves = []
    for part in (slice(0, 17), slice(17, 40), slice(40, 40)):  # the last one is empty
        cut = {name: a[name][part] for name in ("k", "v", "k_pos")}
        halves.append(attend(**{**a, **cut}, return_lse=True))
    weights = [np.exp(part_lse - lse)[..., None] for _, part_lse in halves]
    merged = sum(w * out for w, (out, _) in zip(weights, halves, strict=True))
    assert np.allclose(merged, whole, atol=1e-14)
    assert (halves[2][0] == 0).all()
    assert np.isneginf(halves[2][1]).all()


def test_B3_a_score_of_minus_infinity_is_skipped() -> None:
    a = make(n_q=1, n_kv=3, n_head=1, n_kv_head=1)
    mask = np.array([[0.0, -1e308, 0.0]])
    got = attend(**{**a, "scale": a["scale"]}, mask=mask)
    assert np.allclose(got, attend(**a, mask=np.array([[True, False, True]])))
    far = attend(**a, mask=np.array([[-1e300, -1e300, -1e300]]))
    assert np.isfinite(far).all()
    assert far.sum() != 0


def test_codec2_rotating_all_sides_changes_nothing() -> None:
    a = make(d=256)
    turned = {**a, **{name: rotate(a[name], np.float64) for name in ("q", "k", "v")}}
    assert np.allclose(rotate(attend(**turned), np.float64), attend(**a), atol=1e-12)


def test_B1_scale_is_the_callers() -> None:
    a = make(n_q=1, n_kv=2, n_head=1, n_kv_head=1)
    s = 0.5 * (a["k"][:, 0] @ a["q"][0, 0])
    p = 1 / (1 + math.exp(s[1] - s[0]))
    want = p * a["v"][0, 0] + (1 - p) * a["v"][1, 0]
    assert np.allclose(attend(**{**a, "scale": 0.5})[0, 0], want, atol=1e-14)
