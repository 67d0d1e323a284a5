"""The precision tail request: grammar, groups, resolution (rules T1-T5, T12, A3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkernels.errors import InputError, RequestError
from kvkernels.op import LayerSpec
from kvkernels.request import (
    CacheGroup,
    Family,
    Representation,
    ResolvedTail,
    TailMode,
    TailOp,
    TailRequest,
    TailRoute,
    cache_groups,
    resolve,
)

NONE, STAGE = Representation.NONE, Representation.STAGE
OVERLAY, NATIVE_EXACT = Representation.OVERLAY, Representation.NATIVE_EXACT
NO_SCORE = TailRoute(native=True, missing=(TailOp.EXACT_SCORE,), where="layer 0 on sim:0, q4_0")
NO_VALUE = TailRoute(native=True, missing=(TailOp.EXACT_VALUE, TailOp.MERGE), where="sim:0")
COMPLETE = TailRoute(native=True)
GENERIC = TailRoute(native=False)


@pytest.fixture(autouse=True)
def _no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVK_TAIL_ALLOW_GENERIC", raising=False)


def full(**changes: Any) -> LayerSpec:
    given = {"n_head": 8, "n_kv_head": 4, "head_dim": 128, "k": "q4_0", "v": "q4_0"}
    return LayerSpec(**(given | changes))


def swa(window: int = 1024, **changes: Any) -> LayerSpec:
    return full(window=window, **changes)


def kvarn(window: int | None = None, **changes: Any) -> LayerSpec:
    return full(k="kvarn4", v="kvarn4", window=window, **changes)


def everything(group: CacheGroup, dtype: str) -> TailRoute:
    return COMPLETE


def generic(group: CacheGroup, dtype: str) -> TailRoute:
    return GENERIC


def resolved(
    spec: str,
    layers: Sequence[LayerSpec],
    n_ctx: int = 8192,
    *,
    dtype: str | None = None,
    routes: Any = everything,
    **more: Any,
) -> tuple[ResolvedTail, ...]:
    request = TailRequest.parse(spec, dtype)
    return resolve(request, cache_groups(layers, n_ctx), n_ctx, routes, **more)


def one(spec: str, layer: LayerSpec, n_ctx: int = 8192, **more: Any) -> ResolvedTail:
    (tail,) = resolved(spec, [layer], n_ctx, **more)
    return tail


# T1: the grammar


@pytest.mark.parametrize(
    ("spec", "mode", "counts", "names", "text"),
    [
        ("", TailMode.DISABLED, (), (), ""),
        ("auto", TailMode.AUTOMATIC, (), (), "auto"),
        ("0", TailMode.NUMERIC, (0,), (), "0"),
        ("1024", TailMode.NUMERIC, (1024,), (), "1024"),
        ("007", TailMode.NUMERIC, (7,), (), "7"),
        ("4294967295", TailMode.NUMERIC, (2**32 - 1,), (), "4294967295"),
        ("512,0,1024", TailMode.POSITIONAL, (512, 0, 1024), (), "512,0,1024"),
        ("full=1024", TailMode.NAMED, (1024,), ("full",), "full=1024"),
        ("swa=512,full=01", TailMode.NAMED, (1, 512), ("full", "swa"), "full=1,swa=512"),
        (
            "full@l3=1,swa@l0=2",
            TailMode.NAMED,
            (1, 2),
            ("full@l3", "swa@l0"),
            "full@l3=1,swa@l0=2",
        ),
    ],
)
def test_T1_grammar(
    spec: str, mode: TailMode, counts: tuple[int, ...], names: tuple[str, ...], text: str
) -> None:
    request = TailRequest.parse(spec)
    assert (request.mode, request.counts, request.names) == (mode, counts, names)
    assert str(request) == text
    assert TailRequest.parse(text) == request


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("-1", "'-1'; needed a whole number of rows, 0..4294967295"),
        ("4294967296", "'4294967296'"),
        ("9" * 5000, "0..4294967295"),
        ("1.5", "'1.5'"),
        ("1e3", "'1e3'"),
        ("1_000", "'1_000'"),
        ("\u0661\u0662", "needed a whole number"),
        (" 5", "' 5'"),
        (",", "''"),
        ("512,", "''"),
        ("512,many", "'many'"),
        ("auto,512", "'auto'"),
        ("Auto", "did you mean 'auto'?"),
        ("full", "'full=N,swa=N'"),
        ("full=", "'' in the entry 'full='"),
        ("full=x,swa=1", "'x' in the entry 'full=x'"),
        ("full=auto", "'auto' in the entry 'full=auto'"),
        ("full=4294967296", "'4294967296' in the entry 'full=4294967296'"),
        ("512,swa=512", "'512' in '512,swa=512'; needed name=N in every entry, or in none"),
        ("full=1,2", "'2' in 'full=1,2'; needed name=N in every entry, or in none"),
        ("full=1=2", "'full=1=2' in 'full=1=2'; needed one '=' in an entry"),
        ("=512", "no name in '=512'; needed full, swa or a group id"),
        ("full=1,full=2", "'full' a second time, in 'full=2'; needed every name once"),
    ],
)
def test_T1_a_parse_error_names_the_entry_and_what_is_valid(spec: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        TailRequest.parse(spec)
    assert caught.value.field == "tail"
    assert says in str(caught.value)
    assert "needed" in str(caught.value)


@pytest.mark.parametrize("spec", [None, 1024, b"auto"])
def test_T1_what_is_no_text_is_refused(spec: Any) -> None:
    with pytest.raises(RequestError, match=r"tail: found .*; needed text: '', 'auto'"):
        TailRequest.parse(spec)


@pytest.mark.parametrize("dtype", ["f32", "F16", "q8_0", "", 16])
def test_T1_a_dtype_that_is_neither_f16_nor_bf16_is_refused(dtype: Any) -> None:
    with pytest.raises(RequestError, match=r"tail dtype: found .*needed f16 or bf16, or None"):
        TailRequest.parse("auto", dtype)


@pytest.mark.parametrize("dtype", [None, "f16", "bf16"])
def test_T1_the_dtype_is_part_of_the_value(dtype: str | None) -> None:
    assert TailRequest.parse("auto", dtype).dtype == dtype
    assert len({TailRequest.parse("auto", d) for d in (None, "f16", "bf16", dtype)}) == 3


def test_T1_a_request_is_frozen_hashable_and_knows_no_model() -> None:
    request = TailRequest.parse("full=512,swa=1")
    assert {request: 1}[TailRequest.parse("swa=1,full=512")] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.dtype = "f16"  # type: ignore[misc]
    groups = cache_groups([full(), swa()], 4096)
    first = resolve(request, groups, 4096, everything)
    assert resolve(request, groups, 4096, everything) == first


@pytest.mark.parametrize(
    "state",
    [
        {"mode": TailMode.NUMERIC},
        {"mode": TailMode.NUMERIC, "counts": (1, 2)},
        {"mode": TailMode.NUMERIC, "counts": (-1,)},
        {"mode": TailMode.NUMERIC, "counts": (True,)},
        {"mode": TailMode.NUMERIC, "counts": [1]},
        {"mode": TailMode.POSITIONAL, "counts": (1,)},
        {"mode": TailMode.DISABLED, "counts": (1,)},
        {"mode": TailMode.AUTOMATIC, "names": ("full",)},
        {"mode": TailMode.NAMED},
        {"mode": TailMode.NAMED, "counts": (1, 2), "names": ("full",)},
        {"mode": TailMode.NAMED, "counts": (1, 2), "names": ("swa", "full")},
        {"mode": TailMode.NAMED, "counts": (1,), "names": ("a,b",)},
        {"mode": "auto"},
    ],
)
def test_T1_numeric_without_value_and_other_states_no_text_gives_are_refused(
    state: dict[str, Any],
) -> None:
    with pytest.raises(RequestError, match="what one of '', 'auto', 'N'"):
        TailRequest(**state)


COUNTS = st.integers(0, 2**32 - 1)
NAMES = st.text(st.characters(exclude_characters=",=", codec="utf-8"), min_size=1, max_size=8)
REQUESTS = st.one_of(
    st.just(""),
    st.just("auto"),
    st.lists(COUNTS, min_size=1, max_size=5).map(lambda c: ",".join(map(str, c))),
    st.dictionaries(NAMES, COUNTS, min_size=1, max_size=4).map(
        lambda d: ",".join(f"{k}={v}" for k, v in d.items())
    ),
)


@given(spec=REQUESTS, dtype=st.sampled_from([None, "f16", "bf16"]))
def test_T1_text_and_request_go_both_ways(spec: str, dtype: str | None) -> None:
    request = TailRequest.parse(spec, dtype)
    assert TailRequest.parse(str(request), dtype) == request
    assert str(TailRequest.parse(str(request), dtype)) == str(request)


@given(spec=st.text(st.sampled_from("0123=,fulswa@- "), max_size=12))
def test_T1_any_text_is_a_request_or_a_RequestError(spec: str) -> None:
    try:
        request = TailRequest.parse(spec)
    except RequestError:  # any other exception fails the test
        return
    assert TailRequest.parse(str(request)) == request


# T1: groups


def test_T1_one_group_per_role_in_order_of_the_lowest_layer() -> None:
    groups = cache_groups([swa(), full(), swa(), full()], 8192)
    assert [(g.id, g.role, g.layers, g.window) for g in groups] == [
        ("swa@l0", "swa", (0, 2), 1024),
        ("full@l1", "full", (1, 3), 8192),
    ]
    assert [g.id for g in cache_groups([full(), swa()], 8192)] == ["full@l0", "swa@l1"]
    assert {g.family for g in groups} == {Family.STANDARD}


def test_T1_windows_are_capped_at_the_context_and_groups_are_not_merged_by_it() -> None:
    layers = [swa(512), swa(1024), full()]
    assert [g.window for g in cache_groups(layers, 256)] == [256, 256, 256]
    assert [g.id for g in cache_groups(layers, 256)] == [g.id for g in cache_groups(layers, 8192)]


def test_T1_families_are_groups_of_their_own() -> None:
    groups = cache_groups([kvarn(), full(), kvarn(), full(k="f16", v="q8_0")], 8192)
    assert [(g.id, g.family, g.layers) for g in groups] == [
        ("full@l0", Family.KVARN, (0, 2)),
        ("full@l1", Family.STANDARD, (1, 3)),
    ]


def test_T1_no_layers_no_groups() -> None:
    assert cache_groups([], 8192) == ()
    assert resolved("", []) == resolved("0", []) == ()


@pytest.mark.parametrize("n_ctx", [0, -1, 1.5, True, "8192"])
def test_T1_a_context_is_a_whole_number(n_ctx: Any) -> None:
    with pytest.raises(InputError, match="n_ctx: found"):
        cache_groups([full()], n_ctx)
    with pytest.raises(InputError, match="n_ctx: found"):
        resolve(TailRequest(), cache_groups([full()], 1), n_ctx, everything)


# T1: which rows go to which group

PAIR = (swa(), full())  # swa@l0, full@l1


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        ("", [0, 0]),
        ("0", [0, 0]),
        ("auto", [1024, 1024]),
        ("300", [300, 300]),
        ("256,512", [256, 512]),
        ("full=512,swa=256", [256, 512]),
        ("full@l1=512,swa@l0=256", [256, 512]),
        ("full@l1=512,swa=0", [0, 512]),
    ],
)
def test_T1_rows_reach_their_groups(spec: str, rows: list[int]) -> None:
    tails = resolved(spec, PAIR)
    assert [t.raw for t in tails] == rows
    assert [t.group.id for t in tails] == ["swa@l0", "full@l1"]


@pytest.mark.parametrize(
    ("spec", "layers", "says"),
    [
        ("1,2,3", PAIR, "3 counts in '1,2,3'; needed 2, one for each of swa@l0, full@l1"),
        ("1,2", [full()], "2 counts in '1,2'; needed 1, one for each of full@l0"),
        ("ful=1,swa=1", PAIR, "unknown 'ful'; needed one of swa, full, swa@l0, full@l1. did you"),
        ("full@l0=1,swa=1", PAIR, "unknown 'full@l0'"),
        (
            "swa=1",
            [swa(512), swa(1024)],
            "'swa', which stands for 2 groups; needed one of swa@l0, swa@l1",
        ),
        (
            "full=1",
            [kvarn(), full()],
            "'full', which stands for 2 groups; needed one of full@l0, full@l1",
        ),
        (
            "full=1,full@l1=1,swa=1",
            PAIR,
            "full@l1 twice, as 'full' and as 'full@l1'; needed every group once",
        ),
        ("full=1", PAIR, "nothing for swa@l0 in 'full=1'; needed every group once: swa@l0"),
        ("auto", [], "'auto'; needed no tail on a model without cache layers"),
        ("1", [], "'1'; needed no tail on a model without cache layers"),
        ("0,0", [], "2 counts in '0,0'; needed 0"),
        ("full=0", [], "unknown 'full'; needed one of no group"),
    ],
)
def test_T1_a_resolve_error_names_both_sides(
    spec: str, layers: Sequence[LayerSpec], says: str
) -> None:
    with pytest.raises(RequestError) as caught:
        resolved(spec, layers)
    assert caught.value.field == "tail"
    assert says in str(caught.value)


def test_T1_no_request_at_all_has_its_own_message() -> None:
    nothing: Any = None
    with pytest.raises(RequestError, match=r"found None; needed a TailRequest. TailRequest.parse"):
        resolve(nothing, cache_groups(PAIR, 8192), 8192, everything)


def test_T1_a_group_that_is_not_applicable_gets_nothing() -> None:
    (group,) = cache_groups([full()], 8192)
    (tail,) = resolve(
        TailRequest.parse("auto"),
        [dataclasses.replace(group, applicable=False)],
        8192,
        everything,
    )
    assert (tail.raw, tail.effective, tail.representation) == (0, 0, NONE)


# T2 and T3


@pytest.mark.parametrize(
    ("layer", "n_ctx", "raw", "effective", "representation"),
    [
        (full(), 8192, 0, 0, NONE),
        (full(), 8192, 1, 1, OVERLAY),
        (full(), 8192, 1000, 1000, OVERLAY),
        (full(), 384, 1024, 384, NATIVE_EXACT),
        (full(), 8192, 2**32 - 1, 8192, NATIVE_EXACT),
        (swa(1024), 8192, 1023, 1023, OVERLAY),
        (swa(1024), 8192, 1024, 1024, NATIVE_EXACT),
        (swa(1024), 8192, 1500, 1024, NATIVE_EXACT),
        (swa(1024), 256, 300, 256, NATIVE_EXACT),
    ],
)
def test_T2_standard_groups_keep_what_is_asked_up_to_the_window(
    layer: LayerSpec, n_ctx: int, raw: int, effective: int, representation: Representation
) -> None:
    tail = one(str(raw), layer, n_ctx)
    assert (tail.raw, tail.requested, tail.effective) == (raw, raw, effective)
    assert tail.representation is representation
    assert tail.dtype == ("bf16" if effective else None)
    assert tail.window == min(layer.window or n_ctx, n_ctx)


@pytest.mark.parametrize(
    ("layer", "n_ctx", "raw", "effective", "representation"),
    [
        (kvarn(), 8192, 0, 128, STAGE),
        (kvarn(), 8192, 1, 128, STAGE),
        (kvarn(), 8192, 128, 128, STAGE),
        (kvarn(), 8192, 129, 256, OVERLAY),
        (kvarn(), 8192, 1024, 1024, OVERLAY),
        (kvarn(), 8192, 99999, 8192, NATIVE_EXACT),
        (kvarn(), 100, 0, 100, NATIVE_EXACT),
        (kvarn(), 100, 1, 100, NATIVE_EXACT),
        (kvarn(), 100, 5000, 100, NATIVE_EXACT),
        (kvarn(1024), 8192, 1000, 1024, NATIVE_EXACT),
        (kvarn(1000), 8192, 900, 1000, NATIVE_EXACT),
        (kvarn(1000), 8192, 896, 896, OVERLAY),
    ],
)
def test_T3_kvarn_groups_keep_whole_groups_and_at_least_128(
    layer: LayerSpec, n_ctx: int, raw: int, effective: int, representation: Representation
) -> None:
    tail = one(str(raw), layer, n_ctx)
    assert (tail.raw, tail.requested, tail.effective) == (raw, effective, effective)
    assert tail.representation is representation
    assert tail.dtype == "f16"


def test_T2_groups_of_a_longer_context_are_capped_at_this_one() -> None:
    groups = cache_groups([full(), kvarn()], 8192)
    tails = resolve(TailRequest.parse("1024"), groups, 512, everything)
    assert [(t.effective, t.window, t.representation) for t in tails] == [
        (512, 512, NATIVE_EXACT),
        (512, 512, NATIVE_EXACT),
    ]


def test_T3_a_window_of_nothing_keeps_nothing_and_is_native() -> None:
    group = CacheGroup(role="swa", id="swa@l0", layers=(0,), window=0, family=Family.KVARN)
    (tail,) = resolve(TailRequest(), [group], 8192, everything)
    assert (tail.effective, tail.representation) == (0, NATIVE_EXACT)


def test_T3_rows_of_the_stage_need_no_route() -> None:
    assert one("", kvarn(), routes={}).representation is STAGE
    small = one("", kvarn(), 100, routes={})
    assert (small.effective, small.representation, small.dtype) == (100, STAGE, "f16")
    assert small.notes == ()


def test_T3_rounding_and_capping_are_notes_not_warnings() -> None:
    for tail, text in (
        (one("129", kvarn()), "129 rows asked for, 256 kept; the window is 8192 rows, records"),
        (one("9000", full()), "9000 rows asked for, 8192 kept; the window is 8192 rows"),
    ):
        (note,) = tail.notes
        assert (note.id, note.warning) == ("tail.rows", False)
        assert text in note.text
        assert tail.warnings == ()
    assert one("128", kvarn()).notes == one("1024", full()).notes == ()


@pytest.mark.parametrize(("rollback", "ring"), [(0, 1), (1, 1), (8, 8)])
def test_T8_a_ring_has_rollback_rows_and_the_stage_needs_none(rollback: int, ring: int) -> None:
    assert one("512", full(), rollback=rollback).rollback == ring
    assert one("8192", full(), rollback=rollback).rollback == ring
    assert one("512", kvarn(), rollback=rollback).rollback == ring
    assert one("128", kvarn(), rollback=rollback).rollback == 0
    assert one("0", full(), rollback=rollback).rollback == 0


def test_T8_rollback_is_a_count() -> None:
    with pytest.raises(InputError, match="rollback: found -1"):
        one("512", full(), rollback=-1)


LAYERS = st.builds(
    lambda window, records: (kvarn if records else full)(window=window),
    st.one_of(st.none(), st.integers(1, 5000)),
    st.booleans(),
)


@given(layer=LAYERS, raw=st.integers(0, 10_000), more=st.integers(0, 3000), n_ctx=st.integers(1, 9))
def test_T2_T3_effective_fits_the_window_and_never_falls_when_more_is_asked(
    layer: LayerSpec, raw: int, more: int, n_ctx: int
) -> None:
    n_ctx = 4**n_ctx // 3 + 1
    small, large = one(str(raw), layer, n_ctx), one(str(raw + more), layer, n_ctx)
    assert small.effective <= large.effective <= large.window == min(layer.window or n_ctx, n_ctx)
    assert large.effective >= min(raw + more, large.window)
    assert (small.representation is NATIVE_EXACT) == (
        small.effective == small.window and (raw > 0 or layer.is_kvarn)
    )


@given(raw=st.integers(0, 2**32 - 1), window=st.one_of(st.none(), st.integers(1, 5000)))
def test_T3_an_explicit_tail_is_whole_groups_or_the_window(raw: int, window: int | None) -> None:
    tail = one(str(raw), kvarn(window))
    assert tail.effective % 128 == 0 or tail.effective == tail.window
    assert tail.effective >= min(128, tail.window)
    assert tail.effective < max(raw, 1) + 128


# T4: the dtype of the exact rows


def by_dtype(f16: TailRoute, bf16: TailRoute) -> Any:
    return lambda group, dtype: {"f16": f16, "bf16": bf16}[dtype]


def test_T4_automatic_is_bf16_for_standard_and_f16_for_kvarn() -> None:
    tails = resolved("512", [full(), kvarn()])
    assert [t.dtype for t in tails] == ["bf16", "f16"]
    assert all(t.notes == () for t in tails)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("layer", [full(), kvarn()])
def test_T4_an_explicit_dtype_is_kept(dtype: str, layer: LayerSpec) -> None:
    tail = one("512", layer, dtype=dtype)
    assert (tail.dtype, tail.warnings) == (dtype, ())


def test_T4_automatic_bf16_without_a_route_is_f16_with_one_warning_per_group() -> None:
    tails = resolved("512", [full()] * 3 + [swa()] * 3, routes=by_dtype(COMPLETE, NO_SCORE))
    assert [t.dtype for t in tails] == ["f16", "f16"]
    for tail in tails:
        (note,) = tail.warnings
        assert note.id == "tail.dtype"
        assert f"{tail.group.id}: f16 instead of bf16: no exact K score (layer 0 on" in note.text


@pytest.mark.parametrize(("dtype", "other"), [("bf16", "f16"), ("f16", "bf16")])
def test_T4_an_explicit_dtype_without_a_route_fails_naming_the_operation(
    dtype: str, other: str
) -> None:
    def routes(group: CacheGroup, asked: str) -> TailRoute:
        return NO_SCORE if asked == dtype else COMPLETE

    with pytest.raises(RequestError) as caught:
        one("512", full(), dtype=dtype, routes=routes)
    assert str(caught.value) == (
        f"tail dtype: found overlay tail of full@l0 (layers 0), {dtype}: no exact K score "
        f"(layer 0 on sim:0, q4_0); needed a complete route. {other} has one"
    )


def test_T4_automatic_with_neither_lists_both() -> None:
    with pytest.raises(RequestError) as caught:
        one("8192", full(), routes=by_dtype(NO_VALUE, NO_SCORE))
    text = str(caught.value)
    assert "native_exact tail of full@l0" in text
    assert "bf16: no exact K score (layer 0 on sim:0, q4_0)" in text
    assert "f16: no exact V reduction, no generic merge (sim:0)" in text
    assert "has one" not in text


def test_T4_kvarn_is_f16_or_fails_and_is_never_moved_to_bf16() -> None:
    with pytest.raises(RequestError, match=r"f16: no exact V.*needed a complete route. bf16 has"):
        one("512", kvarn(), routes=by_dtype(NO_VALUE, COMPLETE))


def test_T4_bf16_asked_for_rows_of_the_stage_is_said_aloud() -> None:
    tail = one("100", kvarn(), dtype="bf16")
    assert (tail.representation, tail.dtype) == (STAGE, "f16")
    (note,) = tail.warnings
    assert note.text == "full@l0: its 128 rows lie in the stage, as f16 and not bf16"
    assert one("", kvarn(), dtype="bf16").notes == ()
    assert one("100", kvarn(), dtype="f16").warnings == ()


def test_T4_a_small_covered_kvarn_group_keeps_an_explicit_bf16() -> None:
    assert one("50", kvarn(), 100, dtype="bf16").dtype == "bf16"
    with pytest.raises(RequestError, match="bf16: no exact K score"):
        one("50", kvarn(), 100, dtype="bf16", routes=by_dtype(COMPLETE, NO_SCORE))
    stage = one("50", kvarn(), 100, dtype="f16", routes=by_dtype(NO_SCORE, COMPLETE))
    assert (stage.representation, stage.dtype, stage.warnings) == (STAGE, "f16", ())


def test_T4_routes_as_a_mapping_in_which_an_absent_key_is_no_route() -> None:
    only = {("full@l0", "f16"): COMPLETE}
    tail = one("512", full(), routes=only)
    assert tail.dtype == "f16"
    assert "bf16: no known route" in tail.warnings[0].text
    with pytest.raises(RequestError, match="bf16: no known route"):
        one("512", full(), dtype="bf16", routes=only)


def test_T4_one_bad_group_refuses_the_whole_request() -> None:
    routes = {("full@l0", d): COMPLETE for d in ("f16", "bf16")}
    with pytest.raises(RequestError, match="swa@l1"):
        resolved("512", [full(), swa()], routes=routes)


# T5: the gate


def test_T5_without_a_native_entry_anywhere_nothing_but_the_intrinsic_rows_is_kept() -> None:
    standard, records = resolved("512", [full(), kvarn()], routes=generic)
    assert (standard.raw, standard.requested, standard.effective) == (512, 0, 0)
    assert (standard.representation, standard.dtype, standard.rollback) == (NONE, None, 0)
    assert (records.raw, records.requested, records.effective) == (512, 128, 128)
    assert (records.representation, records.dtype) == (STAGE, "f16")
    for tail in (standard, records):
        (note,) = tail.warnings
        assert note.id == "tail.gate"
        assert f"{tail.group.id}: 512 rows asked for" in note.text
        assert f"{tail.effective} stay exact (KVK_TAIL_ALLOW_GENERIC=1" in note.text


def test_T5_a_small_kvarn_window_keeps_all_of_itself_in_the_stage() -> None:
    tail = one("512", kvarn(100), routes=generic)
    assert (tail.effective, tail.representation) == (100, STAGE)


@pytest.mark.parametrize(("value", "kept"), [("", 0), ("0", 0), ("1", 512), ("no", 512)])
def test_T5_the_environment_keeps_the_tail(
    monkeypatch: pytest.MonkeyPatch, value: str, kept: int
) -> None:
    monkeypatch.setenv("KVK_TAIL_ALLOW_GENERIC", value)
    tail = one("512", full(), routes=generic)
    assert tail.effective == kept
    assert [note.id for note in tail.warnings] == ["tail.gate"]
    assert ("slow and large" in tail.warnings[0].text) is bool(kept)


def test_T5_the_parameter_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one("512", full(), routes=generic, allow_generic=True).effective == 512
    monkeypatch.setenv("KVK_TAIL_ALLOW_GENERIC", "1")
    assert one("512", full(), routes=generic, allow_generic=False).effective == 0


def test_T5_one_native_device_among_the_tails_layers_is_enough() -> None:
    def routes(group: CacheGroup, dtype: str) -> TailRoute:
        return TailRoute(native=group.role == "swa" and dtype == "f16")

    assert [t.effective for t in resolved("512", [full(), swa()], routes=routes)] == [512, 512]
    # A native device that serves no layer with a tail does not count.
    assert [t.effective for t in resolved("512,0", [full(), swa()], routes=routes)] == [0, 0]


def test_T5_no_tail_no_warning() -> None:
    tails = resolved("", [full(), kvarn()], routes=generic)
    assert [t.notes for t in tails] == [(), ()]
    assert [t.effective for t in tails] == [0, 128]


# A3 and T12


def test_A3_a_tail_on_a_K_only_layer_names_layer_group_and_rows() -> None:
    layers = [full(), full(attention="mla"), full()]
    with pytest.raises(RequestError) as caught:
        resolved("512", layers)
    text = str(caught.value)
    assert "a tail of 512 rows for full@l0 with K-only layer 1; needed 0" in text
    assert resolved("0", layers)[0].effective == 0


def test_A3_the_gate_does_not_hide_an_impossible_request() -> None:
    with pytest.raises(RequestError, match="K-only"):
        one("auto", full(attention="mla"), routes=generic)


def test_A3_only_the_group_with_the_K_only_layer_refuses() -> None:
    layers = [full(attention="mla"), swa()]
    assert [t.effective for t in resolved("full=0,swa=512", layers)] == [0, 512]


def test_T12_a_draft_inherits_nothing() -> None:
    draft = TailRequest.parse("auto", "bf16").for_draft()
    assert draft == TailRequest.parse("")
    groups = cache_groups([kvarn(), full()], 8192)
    assert [t.effective for t in resolve(draft, groups, 8192, everything)] == [128, 0]
