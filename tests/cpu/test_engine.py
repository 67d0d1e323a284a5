"""The level below the cache: records in, attention out,
against float64 over what the records hold.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import kvkernels as kvk
from kvkernels.cpu import reference
from kvkernels.errors import InputError, NonFiniteError, UnsupportedOp
from kvkernels.records.layout import Side

HEADS, KV, DIM = 6, 2, 64
SPEC = kvk.LayerSpec(
    n_head=HEADS, n_kv_head=KV, head_dim=DIM, k="kvarn5", v="kvarn3", encoder="published"
)


def rows(n, heads, seed, dim=DIM):
    return np.random.default_rng(seed).normal(size=(n, heads, dim)).astype(np.float32)


@pytest.fixture(scope="module")
def sealed():
    k, v = rows(512, KV, 1), rows(512, KV, 2)
    return k, v, kvk.encode(k, v, SPEC)


def expected(q, sealed_rows, table, k_new, v_new, **options):
    k, v = (
        x.reshape(4, 128, KV, DIM)[table].reshape(-1, KV, DIM).astype(np.float64)
        for x in sealed_rows
    )
    past = len(k)
    if k_new is not None:
        k, v = np.concatenate([k, k_new]), np.concatenate([v, v_new])
    return reference.attend(
        q, k, v, scale=SPEC.scale, q_pos=past + np.arange(len(q)), k_pos=np.arange(len(k)),
        return_lse=True, **options,
    )  # fmt: skip


def test_encode_is_the_reference_encoder_in_the_line_layout(sealed):
    k, v, records = sealed
    assert records.layout == "line"
    for h in range(KV):
        for g in range(4):
            part = slice(128 * g, 128 * (g + 1))
            assert_array_equal(records.k[h, g], reference.encode(k[part, h], Side.K, 5))
            assert_array_equal(records.v[h, g], reference.encode(v[part, h], Side.V, 3))


def test_decode_gives_the_rows_back_in_either_domain(sealed):
    k, _, records = sealed
    plain, _ = kvk.decode(records)
    rotated, _ = kvk.decode(records, rotated=True)
    assert 0 < np.linalg.norm(plain - k) / np.linalg.norm(k) < 0.06
    assert_allclose(reference.rotate(rotated), plain, atol=1e-5)
    again, _ = kvk.decode(records.to_layout("stream"))
    assert_array_equal(again, plain)


def test_F32_layouts_are_a_permutation_and_never_mixed_up(sealed):
    _, _, records = sealed
    stream = records.to_layout("stream")
    assert stream.nbytes == records.nbytes
    assert (stream.k != records.k).any()
    assert_array_equal(stream.to_layout("line").k, records.k)
    assert_array_equal(stream.to_layout("line").v, records.v)
    with pytest.raises(InputError, match=r"records\.layout.*stream.*line"):
        kvk.attend(rows(1, HEADS, 3), stream)
    with pytest.raises(InputError, match="layout"):
        kvk.Records(SPEC, records.k, records.v, "tile")


@pytest.mark.parametrize("n_q", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("current", [True, False])
def test_B2_attend_over_a_group_table(sealed, n_q, current):
    _, _, records = sealed
    table = np.array([2, 0, 3])
    q = rows(n_q, HEADS, 3)
    k_new, v_new = (rows(n_q, KV, 4), rows(n_q, KV, 5)) if current else (None, None)
    out, lse = kvk.attend(q, records, table, k=k_new, v=v_new, activations="f32")
    want, want_lse = expected(q, kvk.decode(records), table, k_new, v_new)
    assert_allclose(out, want, atol=2e-5)
    assert_allclose(lse, want_lse, atol=1e-5)


@pytest.mark.parametrize(
    ("activations", "limit"), [("int16", 5e-4), ("int8", 1.5e-2), ("auto", 1.5e-2)]
)
def test_codec5c_integer_activations_keep_their_error(sealed, activations, limit):
    _, _, records = sealed
    q, k_new, v_new = rows(3, HEADS, 3), rows(3, KV, 4), rows(3, KV, 5)
    out, _ = kvk.attend(q, records, k=k_new, v=v_new, activations=activations)
    want, _ = expected(q, kvk.decode(records), np.arange(4), k_new, v_new)
    error = np.linalg.norm(out - want) / np.linalg.norm(want)
    assert 1e-6 < error <= limit


def test_one_plan_serves_several_sequences_and_layers(sealed):
    _, _, records = sealed
    other = kvk.encode(rows(512, KV, 8), rows(512, KV, 9), SPEC)
    tables, counts = [[0, 1, 2, 3], [3], [], [1, 2]], [1, 20, 2, 3]
    plan = kvk.AttendPlan(SPEC, [np.array(t, np.int32) for t in tables], counts, activations="f32")
    q, k_new, v_new = rows(26, HEADS, 3), rows(26, KV, 4), rows(26, KV, 5)
    for layer in (records, other):
        out, lse = plan.run(q, layer, k_new, v_new)
        decoded, at = kvk.decode(layer), 0
        for table, n in zip(tables, counts, strict=True):
            part = slice(at, at + n)
            want, want_lse = expected(
                q[part], decoded, np.array(table, int), k_new[part], v_new[part]
            )
            assert_allclose(out[part], want, atol=2e-5)
            assert_allclose(lse[part], want_lse, atol=1e-5)
            alone, _ = kvk.attend(
                q[part], layer, np.array(table, int), k=k_new[part], v=v_new[part],
                activations="f32",
            )  # fmt: skip
            assert_array_equal(alone, out[part])  # B7: alone or in a batch
            at += n


def test_B6_merge_states_joins_disjoint_rows(sealed):
    _, _, records = sealed
    q, k_new, v_new = rows(4, HEADS, 3), rows(4, KV, 4), rows(4, KV, 5)
    whole, whole_lse = kvk.attend(q, records, k=k_new, v=v_new, activations="f32")
    first = kvk.attend(q, records, [0, 1], activations="f32")
    second = kvk.attend(q, records, [2, 3], k=k_new, v=v_new, activations="f32")
    out, lse = kvk.merge_states(*first, *second)
    assert_allclose(out, whole, atol=2e-6)
    assert_allclose(lse, whole_lse, atol=2e-6)
    nothing = np.zeros_like(first[0]), np.full_like(first[1], -np.inf)
    kept, kept_lse = kvk.merge_states(*first, *nothing)
    assert_allclose(kept, first[0], rtol=1e-6)
    assert_allclose(kept_lse, first[1], rtol=1e-6)
    out, lse = kvk.merge_states(*nothing, *nothing)
    assert not out.any()
    assert np.isneginf(lse).all()


def test_an_empty_table_without_current_rows_is_exactly_zero(sealed):
    _, _, records = sealed
    out, lse = kvk.attend(rows(2, HEADS, 3), records, [])
    assert not out.any()
    assert np.isneginf(lse).all()


BAD = rows(1, HEADS, 3)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda r: kvk.encode(rows(100, KV, 1), rows(100, KV, 1), SPEC), InputError, "100 rows"),
        (
            lambda r: kvk.encode(rows(128, KV, 1), rows(256, KV, 1), SPEC),
            InputError,
            "v: found shape",
        ),
        (
            lambda r: kvk.encode(rows(128, 3, 1), rows(128, 3, 1), SPEC),
            InputError,
            "k: found shape",
        ),
        (lambda r: kvk.attend(BAD, r, [4]), InputError, "slot 4.*below 4"),
        (lambda r: kvk.attend(BAD, r, [-1]), InputError, "slots >= 0"),
        (lambda r: kvk.attend(BAD, r, [0.5]), InputError, "integers"),
        (lambda r: kvk.attend(BAD[:, :5], r), InputError, "q: found shape"),
        (lambda r: kvk.attend(BAD * np.nan, r), NonFiniteError, "row 0, head 0, channel 0"),
        (lambda r: kvk.attend(BAD, r, k=rows(1, KV, 1)), InputError, "v: found shape|k, v"),
        (lambda r: kvk.attend(BAD.astype(int), r), InputError, "dtype int64"),
        (lambda r: kvk.AttendPlan(SPEC, [], []), InputError, "at least one"),
        (lambda r: kvk.AttendPlan(SPEC, [[0]], [0]), InputError, "whole number >= 1"),
        (lambda r: kvk.attend(BAD, r, activations="int4"), UnsupportedOp, "op.activations"),
    ],
)
def test_bad_input_names_field_found_and_needed(sealed, call, error, text):
    with pytest.raises(error, match=text):
        call(sealed[2])


def test_F18_a_head_dim_without_records_is_refused_with_the_list():
    spec = kvk.LayerSpec(n_head=2, n_kv_head=1, head_dim=80, encoder="published")
    with pytest.raises(UnsupportedOp, match=r"op\.head_dim_k.*64, 128, 256, 512.*found 80"):
        kvk.encode(rows(128, 1, 1, 80), rows(128, 1, 1, 80), spec)
