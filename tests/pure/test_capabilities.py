"""Device records and requirements: unknown is no, every reason is given, nothing raises."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pure_tables import CUDA, NAMES, TABLES, device, make_op

from kvkernels.capabilities import (
    Capability,
    DeviceCaps,
    Feature,
    Reason,
    Requirement,
    Route,
    at_least,
    at_most,
    equal,
    fact_at_least,
    fact_at_most,
    fact_one_of,
    feature,
    fits,
    multiple_of,
    one_of,
    same,
    when,
    within,
)
from kvkernels.errors import InputError
from kvkernels.op import AttentionOp, OpKind


def caps(**changes: Any) -> DeviceCaps:
    return DeviceCaps(**({"id": "x:0", "backend": "x", "name": "X"} | changes))


def found(requirement: Requirement, on: DeviceCaps | None = None, **changes: Any) -> str | None:
    reason = requirement.unmet(make_op("x:0", **changes), on or caps())
    return None if reason is None else reason.found


# ------------------------------------------------------------------ device records


@pytest.mark.parametrize("name", NAMES)
def test_a_device_file_round_trips_and_is_marked_synthetic(name: str) -> None:
    have = device(name)
    assert have.source == "synthetic"
    assert DeviceCaps.from_json(json.dumps(have.to_json())) == have
    assert pickle.loads(pickle.dumps(have)) == have
    assert copy.deepcopy(have) == have
    assert hash(have) == hash(device(name))
    # A hand-written file is no evidence: only the CPU, which runs its tests here, is qualified.
    assert have.backend == "cpu" or not have.qualified


def test_the_devices_the_tables_are_tried_on_are_all_there() -> None:
    assert len(NAMES) == 9
    assert {device(name).backend for name in NAMES} == set(TABLES)


def test_a_record_cannot_be_changed() -> None:
    have = device("cpu-avx2")
    with pytest.raises(TypeError):
        have.facts["cores"] = 1  # type: ignore[index]
    with pytest.raises(AttributeError):
        have.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema": "kvk.device/2"}, "needed 'kvk.device/1'"),
        ({"fatcs": {}, "zzz": 1}, "unknown keys fatcs, zzz; needed only known keys. did you mean"),
        ({"id": 3}, "device.id"),
        ({"id": "y:0"}, "needed 'x:<index>'"),
        ({"id": "x"}, "needed 'x:<index>'"),
        ({"facts": []}, "device.facts"),
        ({"facts": {"a": {"b": 1}}}, "device.facts.a"),
        ({"features": {"f": True}}, "device.features.f"),
        ({"features": {"f": {"advertised": True}}}, "no enabled"),
        ({"features": {"f": {"advertised": True, "enabled": 1}}}, "device.features.f.enabled"),
        ({"features": {"f": {"advertised": None, "enabled": None, "n": 1}}}, "unknown keys n"),
        ({"features": {"f": {"advertised": None, "enabled": None, "note": 1}}}, "f.note"),
        ({"qualified": {"x/attend_a": "yes"}}, "one of recorded, local, none"),
        ({"qualified": 1}, "device.qualified"),
    ],
)
def test_from_json_refuses_a_wrong_shape(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as caught:
        DeviceCaps.from_json(caps().to_json() | change)
    assert text in str(caught.value)


@pytest.mark.parametrize("data", ["", "{", "[]", "null", None, 1])
def test_from_json_refuses_what_is_no_object(data: Any) -> None:
    with pytest.raises(InputError):
        DeviceCaps.from_json(data)


def test_from_json_lists_missing_keys() -> None:
    with pytest.raises(InputError, match="no backend, id, name"):
        DeviceCaps.from_json({"schema": "kvk.device/1"})


def test_lists_become_tuples_and_qualification_defaults_to_none() -> None:
    have = DeviceCaps.from_json(caps().to_json() | {"facts": {"v": [1, [2, "a"]]}})
    assert have.facts["v"] == (1, (2, "a"))
    assert have.to_json()["facts"] == {"v": [1, [2, "a"]]}
    assert have.qualification("x/attend_a") == "none"
    assert caps(qualified={"x/attend_a": "local"}).qualification("x/attend_a") == "local"


# ------------------------------------------------------------------ requirements


@pytest.mark.parametrize("advertised", [True, False, None])
@pytest.mark.parametrize("enabled", [True, False, None])
def test_F27_only_an_enabled_feature_counts(advertised: bool | None, enabled: bool | None) -> None:
    have = caps(features={"f": Feature(advertised, enabled, "why")})
    text = found(feature("f"), have)
    assert (text is None) is (enabled is True)
    assert text is None or text.endswith("(why)")


def test_F27_the_reason_tells_advertised_from_enabled() -> None:
    have = caps(features={"f": Feature(True, False)})
    assert found(feature("f"), have) == "advertised yes, enabled no"
    assert found(feature("g"), have) == "advertised unknown, enabled unknown"


@pytest.mark.parametrize(
    "requirement",
    [fact_at_least("n", 1), fact_at_most("n", 9), fact_one_of("n", (1, 2))],
)
def test_an_unknown_fact_is_unmet(requirement: Requirement) -> None:
    assert found(requirement, caps()) == "unknown"
    assert found(requirement, caps(facts={"n": None})) == "unknown"
    assert found(requirement, caps(facts={"n": 1})) is None


@pytest.mark.parametrize("limit", [1, 16384, 32768, 65536])
def test_F11_a_limit_is_a_threshold_never_an_equality(limit: int) -> None:
    for value in (limit - 1, limit, limit + 1, 2 * limit):
        have = caps(facts={"n": value})
        assert (found(fact_at_least("n", limit), have) is None) is (value >= limit)
        assert (found(fact_at_most("n", limit), have) is None) is (value <= limit)
        assert (found(at_least("n_kv", limit), n_kv=value) is None) is (value >= limit)
        assert (found(at_most("n_kv", limit), n_kv=value) is None) is (value <= limit)
        assert (found(within("max_offset", "n"), have, max_offset=limit) is None) is (
            value >= limit
        )


@pytest.mark.parametrize("value", ["75", True, (7, 5), float("nan")])
def test_a_fact_that_is_no_number_meets_no_limit(value: Any) -> None:
    assert found(fact_at_least("n", 0), caps(facts={"n": value})) is not None
    assert found(fact_at_most("n", 99), caps(facts={"n": value})) is not None
    assert found(within("n_kv", "n"), caps(facts={"n": value})) is not None


@pytest.mark.parametrize(
    ("requirement", "changes", "text"),
    [
        (one_of("head_dim_k", (64, 128)), {"head_dim_k": 80}, "80"),
        (at_least("n_q", 2), {}, "1"),
        (at_most("n_q", 8), {"n_q": 9}, "9"),
        (at_most("window", 8), {}, "None"),
        (multiple_of("bias_stride", 8), {"bias_stride": 498}, "498"),
        (equal("attention", "dense"), {"attention": "mla"}, "mla"),
        (same("head_dim_k", "head_dim_v"), {"head_dim_v": 64}, "head_dim_k=128, head_dim_v=64"),
        (at_most("gqa", 2), {}, "4"),
        (one_of("k_bits", (8,)), {}, "4"),
        (within("n_kv", "absent"), {}, "unknown absent, n_kv=4096"),
    ],
)
def test_op_requirements_say_what_was_found(
    requirement: Requirement, changes: dict[str, Any], text: str
) -> None:
    assert found(requirement, **changes) == text


def test_ids_and_words_are_made_by_the_constructors() -> None:
    made = {
        feature("shader_int64"): ("device.shader_int64", "shader_int64 enabled on the device"),
        fact_at_least("cc", 75): ("device.cc", "cc >= 75"),
        fact_one_of("gfx", ("gfx906", "gfx90a")): ("device.gfx", "gfx in gfx906, gfx90a"),
        one_of("head_dim_k", (64, 128)): ("op.head_dim_k", "head_dim_k in 64, 128"),
        multiple_of("bias_stride", 8): ("op.bias_stride", "bias_stride a multiple of 8"),
        when(equal("bias", "additive"), multiple_of("bias_stride", 8)): (
            "op.bias_stride",
            "bias_stride a multiple of 8 when bias = additive",
        ),
    }
    for requirement, expected in made.items():
        assert (requirement.id, requirement.needs) == expected
    reason = Reason("op.n_q", "n_q <= 8", "9", "split the step")
    assert str(reason) == "[op.n_q] needs n_q <= 8; found 9 (split the step)"


def test_when_applies_only_where_its_condition_holds() -> None:
    requirement = when(equal("bias", "additive"), multiple_of("bias_stride", 8))
    assert found(requirement, bias_stride=498) is None
    assert found(requirement, bias="additive", bias_stride=504) is None
    assert found(requirement, bias="additive", bias_stride=498) == "498"


def test_V1_when_an_unknown_condition_does_not_excuse() -> None:
    old = when(fact_at_most("cc", 74), fact_at_most("nvrtc", 12999, hint="install cupy-cuda12x"))
    assert found(old, caps(facts={"cc": 90, "nvrtc": 13000})) is None
    assert found(old, caps(facts={"cc": 61, "nvrtc": 12040})) is None
    assert found(old, caps(facts={"cc": 61, "nvrtc": 13000})) == "13000"
    assert found(old, caps(facts={"nvrtc": 13000})) == "13000"
    assert found(old, caps(facts={"cc": 61})) == "unknown"


@pytest.mark.parametrize("make", [at_least, at_most, equal])
def test_a_misspelt_field_fails_when_the_table_is_built(make: Any) -> None:
    with pytest.raises(InputError, match="did you mean 'head_dim_k'"):
        make("head_dimk", 1)


@pytest.mark.parametrize("error", [ZeroDivisionError, TypeError, AttributeError, RecursionError])
def test_a_check_that_raises_is_unmet_with_the_cause(error: type[Exception]) -> None:
    def check(op: AttentionOp, on: DeviceCaps) -> str | None:
        raise error("oops")

    text = f"unknown: the check raised {error.__name__}: oops"
    assert found(Requirement("op.x", "x", check)) == text
    assert found(when(Requirement("op.x", "x", check), at_most("n_q", 0))) == "1"


def test_unmet_gives_all_reasons_in_table_order() -> None:
    row = Capability(
        entry="x/attend_a",
        kind=OpKind.ATTEND,
        route=Route.NATIVE,
        requires=(at_most("n_q", 0), at_least("n_q", 1), feature("f"), equal("n_kv", 7)),
    )
    reasons = row.unmet(make_op("x:0"), caps())
    assert [r.id for r in reasons] == ["op.n_q", "device.f", "op.n_kv"]


@pytest.mark.parametrize(
    "change", [{"entry": "noslash"}, {"entry": "x/"}, {"entry": "/y"}, {"route": Route.REFUSE}]
)
def test_a_row_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    values = {"entry": "x/attend_a", "kind": OpKind.ATTEND, "route": Route.NATIVE, "requires": ()}
    with pytest.raises(InputError):
        Capability(**(values | change))


FACT = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)


@given(
    facts=st.dictionaries(st.sampled_from(["a", "compute_capability", "nvrtc_version"]), FACT),
    n_q=st.none() | st.integers() | st.floats() | st.text(max_size=2),
    odd=st.none() | st.text(max_size=2) | st.lists(st.integers(), max_size=2),
)
def test_requirements_are_total(facts: dict[str, Any], n_q: Any, odd: Any) -> None:
    have = caps(facts=facts)
    op = make_op("x:0", n_q=n_q, k_type="kvarn4", bias=odd, head_dim_k=odd, window=n_q)
    for make in (at_least, at_most, equal):
        make("n_q", 4).unmet(op, have)
        make("window", 4).unmet(op, have)
    for requirement in (
        multiple_of("n_q", 3),
        one_of("head_dim_k", (64, 128)),
        same("n_q", "head_dim_k"),
        within("n_q", "a"),
        when(one_of("bias", ("bool",)), within("window", "a")),
    ):
        requirement.unmet(op, have)
    for row in CUDA:
        for reason in row.unmet(op, have):
            assert reason.id
            assert reason.needs
            assert isinstance(reason.found, str)


def test_what_a_requirement_asks_of_the_device_is_known_without_asking_it() -> None:
    limit = within("max_offset", "max_alloc")
    assert (limit.fact, limit.of_device) == ("max_alloc", True)
    only = when(equal("body", True), limit)
    assert (only.fact, only.of_device) == ("max_alloc", True)
    assert fact_at_least("lanes", 32).of_device
    assert feature("fp64").of_device
    assert not at_most("n_q", 16).of_device


def test_an_amount_that_is_computed_from_the_operation_fits_or_says_both_numbers() -> None:
    need = fits("double", "room", lambda op: 2 * op.n_q, hint="less")
    on = caps(facts={"room": 8})
    assert found(need, on, n_q=4) is None
    assert str(need.unmet(make_op("x:0", n_q=5), on)) == (
        "[op.double] needs double <= room of the device; found 10 > 8 (less)"
    )
    assert found(need, caps(), n_q=1) == "unknown room, double=2"
    assert found(fits("none", "room", lambda op: None), on) == "None > 8"
