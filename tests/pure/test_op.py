"""LayerSpec and AttentionOp: validation, resolved defaults, identity, text and JSON."""

from __future__ import annotations

import dataclasses
import json
import timeit
from typing import Any

import pytest
from pure_tables import make_op

from kvkernels.errors import InputError, RequestError
from kvkernels.op import CACHE_TYPES, KVARN_BITS, STANDARD_TYPES, AttentionOp, LayerSpec, OpKind


def spec(**changes: Any) -> LayerSpec:
    return LayerSpec(**({"n_head": 32, "n_kv_head": 8, "head_dim": 128} | changes))


def test_defaults_are_resolved_to_numbers() -> None:
    layer = spec()
    assert (layer.head_dim_v, layer.sink_tokens, layer.gqa) == (128, 128, 4)
    assert layer.scale == 128**-0.5
    assert layer.encoder == "aware"  # codec.md 9
    assert (layer.k, layer.k_bits, layer.v_bits, layer.is_kvarn) == ("kvarn4", 4, 4, True)
    assert spec(k="f16", v="q8_0").k_bits is None
    assert not spec(k="f16", v="q8_0").is_kvarn
    assert spec(scale=0.5, head_dim_v=64).head_dim_v == 64
    assert spec() == layer
    assert hash(spec()) == hash(layer)


def test_C2_sink_tokens_depend_on_the_window() -> None:
    assert spec(window=512).sink_tokens == 0
    assert spec(sink_tokens=0).sink_tokens == 0
    assert spec(sink_tokens=256).sink_tokens == 256
    assert spec(window=512, sink_tokens=0).sink_tokens == 0
    with pytest.raises(InputError, match="found 128 with window=512; needed 0"):
        spec(window=512, sink_tokens=128)
    with pytest.raises(InputError, match="found 100; needed a multiple of 128"):
        spec(sink_tokens=100)
    with pytest.raises(InputError, match="sink_tokens"):
        spec(sink_tokens=-128)


@pytest.mark.parametrize("k", KVARN_BITS)
@pytest.mark.parametrize("v", KVARN_BITS)
def test_A1_all_36_kvarn_pairs_build(k: str, v: str) -> None:
    assert (spec(k=k, v=v).k_bits, spec(k=k, v=v).v_bits) == (KVARN_BITS[k], KVARN_BITS[v])


@pytest.mark.parametrize(("k", "v"), [("kvarn4", "f16"), ("q8_0", "kvarn5")])
def test_A1_a_mixed_pair_is_refused_naming_both(k: str, v: str) -> None:
    with pytest.raises(RequestError, match=f"k='{k}' with v='{v}'"):
        spec(k=k, v=v)


def test_A1_standard_types_are_known_by_name() -> None:
    assert len(CACHE_TYPES) == 14
    for name in STANDARD_TYPES:
        assert not spec(k=name, v=name).is_kvarn


@pytest.mark.parametrize(("n_head", "n_kv_head"), [(30, 8), (7, 2), (4, 8)])
def test_A4_gqa_that_is_not_integral_is_refused_with_both_numbers(
    n_head: int, n_kv_head: int
) -> None:
    with pytest.raises(InputError, match=f"n_head={n_head} with n_kv_head={n_kv_head}"):
        spec(n_head=n_head, n_kv_head=n_kv_head)
    with pytest.raises(InputError, match=f"n_head={n_head} with n_kv_head={n_kv_head}"):
        make_op("cpu:0", n_head=n_head, n_kv_head=n_kv_head)


def test_F18_head_dim_80_can_be_built_so_that_a_table_can_refuse_it() -> None:
    assert spec(head_dim=80).head_dim_v == 80


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"n_head": 0}, "n_head"),
        ({"n_kv_head": -1}, "n_kv_head"),
        ({"head_dim": 128.0}, "head_dim"),
        ({"head_dim": True}, "head_dim"),
        ({"head_dim": None}, "head_dim"),
        ({"head_dim_v": 0}, "head_dim_v"),
        ({"window": 0}, "window"),
        ({"window": "512"}, "window"),
        ({"scale": float("nan")}, "scale"),
        ({"scale": "x"}, "scale"),
        ({"softcap": float("inf")}, "softcap"),
        ({"softcap": -1.0}, "softcap"),
        ({"alibi": float("nan")}, "alibi"),
        ({"sink_logits": 1}, "sink_logits"),
    ],
)
def test_a_wrong_number_names_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        spec(**changes)
    assert caught.value.field == field
    assert "needed" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"k": "kvarn"}, "did you mean 'kvarn"),
        ({"v": "kvarn7"}, "did you mean 'kvarn"),
        ({"k": "q8"}, "did you mean 'q8_0'?"),
        ({"attention": "dens"}, "did you mean 'dense'?"),
        ({"encoder": "publish"}, "did you mean 'published'?"),
        ({"k": 4}, "one of kvarn2"),
    ],
)
def test_an_unknown_name_is_refused_with_a_suggestion(changes: dict[str, Any], hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        spec(**changes)
    assert hint in str(caught.value)


def test_numpy_integers_are_integers() -> None:
    numpy = pytest.importorskip("numpy")
    assert type(spec(n_head=numpy.int64(32)).n_head) is int


def test_for_layer_copies_what_the_layer_says() -> None:
    layer = spec(k="kvarn5", v="kvarn2", window=4096, softcap=50.0, alibi=8.0, sink_logits=True)
    op = AttentionOp.for_layer(
        layer, "cuda:1", n_q=4, n_kv=99, body=True, stage=False, current=True
    )
    assert (op.device, op.n_q, op.n_kv, op.kind) == ("cuda:1", 4, 99, OpKind.ATTEND)
    assert (op.k_type, op.v_type, op.k_bits, op.v_bits) == ("kvarn5", "kvarn2", 5, 2)
    assert (op.window, op.softcap, op.alibi, op.sink_logits) == (4096, 50.0, 8.0, True)
    assert (op.head_dim_k, op.head_dim_v, op.gqa) == (128, 128, 4)
    assert AttentionOp.for_layer(layer, "cpu:0", **_facts(), kind=OpKind.COMMIT).kind == "commit"


def _facts() -> dict[str, Any]:
    return {"n_q": 1, "n_kv": 1, "body": False, "stage": True, "current": False}


def test_an_op_is_a_frozen_hashable_value() -> None:
    op = make_op("cpu:0")
    assert {op: 1}[make_op("cpu:0")] == 1
    assert make_op("cpu:0", n_q=2) != op
    with pytest.raises(dataclasses.FrozenInstanceError):
        op.n_q = 2  # type: ignore[misc]


def test_text_is_one_line_and_shows_every_field_that_is_not_default() -> None:
    assert str(make_op("cpu:0", sink_rows=128)) == (
        "attend cpu:0 q1 kv4096 s1 h32/8 d128/128 kvarn4/kvarn4 f32/f32 full "
        "rows=body+stage+current+sink128"
    )
    plain = str(make_op("cpu:0"))
    other = {"n_q": 3, "n_seq": 2, "window": 7, "bias": "bool", "bias_stride": 5, "causal": False}
    other |= {"body": False, "stage": False, "current": False, "layout": "stream", "alignment": 4}
    other |= {"q_dtype": "f16", "kv_dtype": "f16", "softcap": 1.5, "alibi": 2.0, "encoder": "aware"}
    other |= {"sink_logits": True, "max_offset": 9, "scratch_bytes": 8, "attention": "mla"}
    for name, value in other.items():
        text = str(make_op("cpu:0", **{name: value}))
        assert text != plain, name
        assert "\n" not in text
    assert "rows=none" in str(make_op("cpu:0", body=False, stage=False, current=False))


def test_json_round_trip_through_text() -> None:
    op = make_op("hip:0", window=128, kind=OpKind.MATERIALIZE, softcap=30.0)
    text = json.dumps(op.to_json())
    assert json.loads(text)["schema"] == "kvk.op/1"
    again = AttentionOp.from_json(text)
    assert again == op
    assert isinstance(again.kind, OpKind)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n_q": "1"}, "op.n_q"),
        ({"n_q": True}, "op.n_q"),
        ({"body": 1}, "op.body"),
        ({"window": 1.5}, "op.window"),
        ({"kind": "attent"}, "did you mean 'attend'"),
        ({"kind": 1}, "op.kind"),
        ({"softcap": float("nan")}, "op.softcap"),
        ({"head_dim": 128}, "unknown keys head_dim"),
        ({"schema": "kvk.op/9"}, "needed 'kvk.op/1'"),
    ],
)
def test_from_json_refuses_a_wrong_shape(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as caught:
        AttentionOp.from_json(make_op("cpu:0").to_json() | change)
    assert text in str(caught.value)


@pytest.mark.parametrize("data", ["", "[1]", "{", "null", 3])
def test_from_json_refuses_what_is_no_object(data: Any) -> None:
    with pytest.raises(InputError):
        AttentionOp.from_json(data)


def test_from_json_lists_missing_keys() -> None:
    with pytest.raises(InputError, match=r"no .*body.*device"):
        AttentionOp.from_json({"schema": "kvk.op/1"})


def test_building_is_cheap_enough_for_every_layer_of_every_step() -> None:
    values = make_op("cpu:0").to_json()
    del values["schema"]
    # 10 us is the target on an idle core; 3x is head room for a busy one, least of 5 runs.
    taken = min(timeit.repeat(lambda: AttentionOp(**values), number=2000, repeat=5)) / 2000
    assert taken < 30e-6
