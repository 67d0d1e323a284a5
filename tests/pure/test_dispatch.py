"""The decision: routes, complete reasons, its text, and the second check of the final operation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pure_tables import ANY, CPU, CUDA, HIP, NAMES, OPENCL, TABLES, VULKAN, device, make_op, row

from kvkernels.capabilities import (
    Capability,
    DeviceCaps,
    Feature,
    Requirement,
    at_most,
    fact_at_least,
    feature,
    one_of,
)
from kvkernels.dispatch import Decision, Policy, Route, confirm, decide
from kvkernels.errors import InputError, RouteMismatch
from kvkernels.op import STANDARD_TYPES, AttentionOp, OpKind

RANK = {Route.NATIVE: 0, Route.MATERIALIZE: 1, Route.REFUSE: 2}
NEVER = Requirement("op.never", "what nothing has", lambda op, caps: "nothing")


def on(name: str, policy: Policy = ANY, **changes: Any) -> Decision:
    caps = device(name)
    return decide(make_op(caps.id, **changes), TABLES[caps.backend], caps, policy)


def with_facts(caps: DeviceCaps, **facts: Any) -> DeviceCaps:
    return DeviceCaps.from_json(caps.to_json() | {"facts": dict(caps.facts) | facts})


# ------------------------------------------------------------------ examples per device


@pytest.mark.parametrize(
    ("name", "changes", "route", "entry"),
    [
        ("cpu-avx2", {}, Route.NATIVE, "cpu/attend_decode"),
        ("cpu-generic", {"n_q": 512}, Route.NATIVE, "cpu/attend_prefill"),
        ("cpu-avx2", {"kind": OpKind.COMMIT}, Route.NATIVE, "cpu/commit"),
        ("cpu-avx2", {"kind": OpKind.MATERIALIZE}, Route.REFUSE, None),
        ("cuda-h200-sm90", {}, Route.NATIVE, "cuda/attend_mma"),
        ("cuda-a100-sm80", {"head_dim_k": 256, "head_dim_v": 256}, Route.NATIVE, None),
        ("cuda-gtx1070-sm61", {}, Route.NATIVE, "cuda/attend_portable"),
        ("cuda-gtx1070-sm61", {"n_q": 512}, Route.MATERIALIZE, "cuda/attend_materialized"),
        ("hip-rx7900xtx-gfx1100", {}, Route.NATIVE, "hip/attend_portable"),
        ("vulkan-lavapipe", {}, Route.NATIVE, "vulkan/attend_direct"),
        ("vulkan-int64-not-enabled", {}, Route.NATIVE, "vulkan/attend_descriptor"),
        ("vulkan-int64-not-enabled", {"n_q": 512}, Route.MATERIALIZE, None),
        ("opencl-pocl", {"n_q": 512}, Route.NATIVE, "opencl/attend_portable"),
    ],
)
def test_example_tables_on_devices_nobody_here_has(
    name: str, changes: dict[str, Any], route: Route, entry: str | None
) -> None:
    decision = on(name, **changes)
    assert decision.route is route
    assert decision.ok is (route is not Route.REFUSE)
    if entry is not None:
        assert decision.entry == entry


def test_V1_pascal_with_a_cuda_13_compiler_is_told_what_to_install() -> None:
    caps = with_facts(device("cuda-gtx1070-sm61"), nvrtc=13020)
    decision = decide(make_op(caps.id), CUDA, caps, ANY)
    assert decision.route is Route.REFUSE
    assert "found 13020 (install cupy-cuda12x)" in decision.explain()
    assert "install cupy-cuda12x" in decision.hint


@pytest.mark.parametrize("gfx", ["gfx1201", "gfx9999", None])
def test_V2_an_unknown_gfx_number_is_unknown_not_a_relative(gfx: str | None) -> None:
    caps = with_facts(device("hip-rx7900xtx-gfx1100"), gfx=gfx)
    assert decide(make_op(caps.id), HIP, caps, ANY).entry == "hip/attend_materialized"


STATES = (Feature(False, False), Feature(True, False), Feature(True, True))


@pytest.mark.parametrize("int64", STATES, ids=str)
@pytest.mark.parametrize("bda", STATES, ids=str)
@pytest.mark.parametrize("fp16", STATES, ids=str)
def test_F27_direct_needs_both_enabled_else_materialise_else_refuse(
    int64: Feature, bda: Feature, fp16: Feature
) -> None:
    base = device("vulkan-lavapipe")
    names = ("shader_int64", "buffer_device_address", "storage_buffer_16bit")
    caps = DeviceCaps(
        id=base.id,
        backend=base.backend,
        name=base.name,
        facts=base.facts,
        features=dict(zip(names, (int64, bda, fp16), strict=True)),
    )
    # n_q above the descriptor row's limit leaves the direct and the materialising row.
    decision = decide(make_op(base.id, n_q=512), VULKAN, caps, ANY)
    if int64.enabled and bda.enabled:
        assert decision.entry == "vulkan/attend_direct"
    elif fp16.enabled:
        assert decision.entry == "vulkan/attend_materialized"
        assert decision.route is Route.MATERIALIZE
    else:
        assert decision.route is Route.REFUSE


# ------------------------------------------------------------------ never another device


def test_F09_the_cpu_being_able_does_not_count_for_the_gpu() -> None:
    gpu = device("cuda-gtx1070-sm61")
    refused = decide(make_op(gpu.id, attention="mla"), CUDA, gpu, ANY)
    assert refused.route is Route.REFUSE
    assert refused.op.device == gpu.id
    with pytest.raises(InputError, match="'cuda:0' with the capabilities of 'cpu:0'"):
        decide(make_op(gpu.id), CPU, device("cpu-avx2"), ANY)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pair", [("q8_0", "q4_0"), ("f16", "q8_0"), ("kvarn4", "kvarn8")])
def test_F12_a_type_pair_stays_on_its_device_or_is_refused(
    name: str, pair: tuple[str, str]
) -> None:
    decision = on(name, k_type=pair[0], v_type=pair[1], n_q=512)
    backend = device(name).backend
    assert decision.op.device == device(name).id
    assert all(c.entry.startswith(f"{backend}/") for c in decision.considered)
    if pair[0] in STANDARD_TYPES:
        assert decision.route is Route.REFUSE
        assert f"found {pair[0]}" in decision.explain()
    else:
        assert decision.ok


def test_F12_a_pair_one_kernel_lacks_goes_to_the_kernel_that_has_it() -> None:
    table = (
        row("cuda/attend_picky", Route.NATIVE, one_of("v_type", ("kvarn4",))),
        row("cuda/attend_general", Route.NATIVE),
    )
    caps = device("cuda-h200-sm90")
    assert decide(make_op(caps.id), table, caps, ANY).entry == "cuda/attend_picky"
    other = decide(make_op(caps.id, v_type="kvarn8"), table, caps, ANY)
    assert other.entry == "cuda/attend_general"
    assert [len(c.reasons) for c in other.considered] == [1, 0]


# ------------------------------------------------------------------ order, policy, completeness


def test_routes_come_before_table_order_and_table_order_decides_inside_a_route() -> None:
    caps = device("vulkan-lavapipe")
    entries = [c.entry for c in decide(make_op(caps.id), VULKAN, caps, ANY).considered]
    assert entries == [f"vulkan/attend_{n}" for n in ("direct", "descriptor", "materialized")]
    swapped = decide(make_op(caps.id), (VULKAN[2], VULKAN[1], VULKAN[0]), caps, ANY)
    assert swapped.entry == "vulkan/attend_descriptor"


def test_rows_after_the_chosen_one_are_considered_too() -> None:
    decision = on("cuda-h200-sm90", n_q=512)
    assert decision.entry == "cuda/attend_mma"
    assert [c.entry for c in decision.considered] == [r.entry for r in CUDA]
    assert [r.id for r in decision.considered[1].reasons] == ["op.n_q"]


def test_F19_an_entry_without_parity_is_not_picked_by_default() -> None:
    default = on("cuda-h200-sm90", Policy())
    assert default.route is Route.REFUSE
    assert all([r.id for r in c.reasons][-1] == "policy.unqualified" for c in default.considered)
    assert "or allow_unqualified=True" in default.hint
    qualified = DeviceCaps.from_json(
        device("cuda-h200-sm90").to_json() | {"qualified": {"cuda/attend_portable": "recorded"}}
    )
    chosen = decide(make_op("cuda:0"), CUDA, qualified)
    assert chosen.entry == "cuda/attend_portable"
    assert on("cpu-avx2", Policy()).entry == "cpu/attend_decode"


def test_policy_materialize_and_entry() -> None:
    assert on("cuda-gtx1070-sm61", ANY, n_q=512).route is Route.MATERIALIZE
    strict = Policy(allow_unqualified=True, allow_materialize=False)
    refused = on("cuda-gtx1070-sm61", strict, n_q=512)
    assert refused.route is Route.REFUSE
    assert "[policy.materialize] needs allow_materialize=True; found False" in refused.explain()

    forced = on("cuda-h200-sm90", Policy(allow_unqualified=True, entry="cuda/attend_portable"))
    assert forced.entry == "cuda/attend_portable"
    assert [r.id for r in forced.considered[0].reasons] == ["policy.entry"]
    wrong = on("cuda-h200-sm90", Policy(allow_unqualified=True, entry="cuda/atend_mma"))
    assert wrong.route is Route.REFUSE
    assert "did you mean 'cuda/attend_mma'?" in wrong.explain()


def test_no_row_of_the_kind_is_a_refusal_that_says_so() -> None:
    decision = on("opencl-pocl", kind=OpKind.COMMIT)
    assert decision.considered == ()
    assert decision.explain().endswith("hint: this backend has no entry that does commit")


# ------------------------------------------------------------------ the text


def test_F18_explain_head_dim_80() -> None:
    decision = on("cpu-avx2", Policy(), head_dim_k=80, head_dim_v=80)
    assert (
        decision.explain()
        == """\
refuse: no entry fits
  op: attend cpu:0 q1 kv4096 s1 h32/8 d80/80 kvarn4/kvarn4 f32/f32 full rows=body+stage+current
  - cpu/attend_decode (native)
      [op.head_dim_k] needs head_dim_k in 64, 128, 256, 512; found 80
  - cpu/attend_prefill (native)
      [op.head_dim_k] needs head_dim_k in 64, 128, 256, 512; found 80
      [op.n_q] needs n_q >= 2; found 1
  hint: cpu/attend_decode would fit with head_dim_k in 64, 128, 256, 512"""
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [40, 80, 96, 112, 120, 192, 576])
def test_F18_a_head_dim_outside_the_list_is_refused_with_the_list(name: str, dim: int) -> None:
    decision = on(name, head_dim_k=dim, head_dim_v=dim)
    assert decision.route is Route.REFUSE
    assert f"needs head_dim_k in 64, 128, 256, 512; found {dim}" in decision.explain()


def test_F35_explain_a_bias_stride_that_fits_nowhere() -> None:
    op = {"bias": "additive", "bias_stride": 498, "n_q": 16, "head_dim_k": 32, "head_dim_v": 32}
    stride = "bias_stride a multiple of 8 when bias in additive"
    dims = "head_dim_k in 64, 128, 256, 512"
    assert (
        on("cpu-avx2", Policy(), **op).explain()
        == f"""\
refuse: no entry fits
  op: attend cpu:0 q16 kv4096 s1 h32/8 d32/32 kvarn4/kvarn4 f32/f32 full rows=body+stage+current \
bias=additive bias_stride=498
  - cpu/attend_decode (native)
      [op.head_dim_k] needs {dims}; found 32
      [op.n_q] needs n_q <= 8; found 16
      [op.bias_stride] needs {stride}; found 498
  - cpu/attend_prefill (native)
      [op.head_dim_k] needs {dims}; found 32
      [op.bias_stride] needs {stride}; found 498
  hint: cpu/attend_prefill would fit with {dims}; {stride}"""
    )
    assert on("cpu-avx2", **(op | {"head_dim_k": 64, "head_dim_v": 64, "bias_stride": 504})).ok


def test_explain_on_success_shows_the_whole_table() -> None:
    assert (
        on("vulkan-int64-not-enabled").explain()
        == """\
native: vulkan/attend_descriptor
  op: attend vulkan:0 q1 kv4096 s1 h32/8 d128/128 kvarn4/kvarn4 f32/f32 full rows=body+stage+current
  - vulkan/attend_direct (native)
      [device.shader_int64] needs shader_int64 enabled on the device; found advertised yes, \
enabled no (the wrapper creates its device without a feature chain)
      [device.buffer_device_address] needs buffer_device_address enabled on the device; found \
advertised yes, enabled no (the wrapper creates its device without a feature chain)
  + vulkan/attend_descriptor (native)
  + vulkan/attend_materialized (materialize)"""
    )


def test_json_says_what_the_text_says() -> None:
    decision = on("cpu-avx2", Policy(), head_dim_k=80, head_dim_v=80)
    data = json.loads(json.dumps(decision.to_json()))
    assert data["schema"] == "kvk.decision/1"
    assert (data["route"], data["entry"], data["hint"]) == ("refuse", None, decision.hint)
    assert AttentionOp.from_json(data["op"]) == decision.op
    reason = {"id": "op.n_q", "needs": "n_q >= 2", "found": "1", "hint": ""}
    assert reason in data["considered"][1]["reasons"]


# ------------------------------------------------------------------ properties

OPS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(OpKind),
        "n_q": st.sampled_from([1, 2, 8, 9, 16, 17, 512]),
        "n_kv": st.sampled_from([1, 128, 4096, 1 << 20]),
        "head_dim_k": st.sampled_from([32, 64, 80, 128, 256]),
        "head_dim_v": st.sampled_from([64, 128, 256]),
        "k_type": st.sampled_from(["kvarn2", "kvarn8", "f16"]),
        "v_type": st.sampled_from(["kvarn4", "q8_0"]),
        "attention": st.sampled_from(["dense", "mla"]),
        "softcap": st.sampled_from([0.0, 30.0]),
        "bias": st.sampled_from(["none", "bool", "additive"]),
        "bias_stride": st.sampled_from([0, 498, 504]),
        "max_offset": st.sampled_from([0, 1 << 27, (1 << 27) + 1, 1 << 33]),
        "scratch_bytes": st.sampled_from([0, 1 << 40]),
        "body": st.booleans(),
    }
)
POLICIES = st.builds(
    Policy,
    allow_materialize=st.booleans(),
    allow_unqualified=st.booleans(),
    entry=st.sampled_from([None, "cpu/attend_decode", "cuda/attend_mma", "no/such"]),
)
WHERE = st.sampled_from(NAMES)


@given(name=WHERE, changes=OPS, policy=POLICIES)
def test_decide_is_total_deterministic_complete_and_stays_on_its_device(
    name: str, changes: dict[str, Any], policy: Policy
) -> None:
    caps = device(name)
    table = TABLES[caps.backend]
    op = make_op(caps.id, **changes)
    decision = decide(op, table, caps, policy)
    assert decision == decide(op, table, device(name), policy)
    assert decision.explain() == decide(op, table, caps, policy).explain()
    assert decision.op is op
    assert sorted(c.entry for c in decision.considered) == sorted(
        r.entry for r in table if r.kind is op.kind
    )
    if decision.ok:
        assert decision.entry in {r.entry for r in table}
        assert decision.entry == next(c for c in decision.considered if not c.reasons).entry
    else:
        assert decision.entry is None
        assert all(c.reasons for c in decision.considered)
        assert decision.hint
    text = decision.explain()
    for considered in decision.considered:
        assert f"{considered.entry} ({considered.route})" in text
        assert all(str(reason) in text for reason in considered.reasons)


@given(name=WHERE, changes=OPS, policy=POLICIES, data=st.data())
def test_an_added_unmet_requirement_never_upgrades_a_route(
    name: str, changes: dict[str, Any], policy: Policy, data: st.DataObject
) -> None:
    caps = device(name)
    table = TABLES[caps.backend]
    at = data.draw(st.integers(0, len(table) - 1))
    old = table[at]
    harder = Capability(
        entry=old.entry, kind=old.kind, route=old.route, requires=(*old.requires, NEVER)
    )
    op = make_op(caps.id, **changes)
    before = decide(op, table, caps, policy)
    after = decide(op, (*table[:at], harder, *table[at + 1 :]), caps, policy)
    assert RANK[after.route] >= RANK[before.route]
    assert after.entry != old.entry


# Facts for which less is more would be limits of another kind; there are none but the compiler's.
LIMITS = {
    "compute_capability",
    "local_memory",
    "memory",
    "max_compute_shared_memory",
    "max_storage_buffer_range",
    "max_push_constants",
    "max_threads",
    "compiler",
}


@settings(max_examples=200)
@given(name=WHERE, changes=OPS, data=st.data())
def test_F11_a_larger_limit_never_picks_a_worse_route(
    name: str, changes: dict[str, Any], data: st.DataObject
) -> None:
    caps = device(name)
    limits = sorted(LIMITS & caps.facts.keys())
    if not limits:
        return
    fact = data.draw(st.sampled_from(limits))
    edges = (50, 75, 80, 128, 16384, 32768, 65536, 1 << 27)
    v = data.draw(st.sampled_from(edges))
    op = make_op(caps.id, **changes)
    ranks = [
        RANK[decide(op, TABLES[caps.backend], with_facts(caps, **{fact: value}), ANY).route]
        for value in (None, 0, v - 1, v, v + 1, 2 * v)
    ]
    assert ranks == sorted(ranks, reverse=True)


# ------------------------------------------------------------------ confirm


@given(name=WHERE, changes=OPS, policy=POLICIES)
def test_F02_planned_native_means_the_final_check_accepts(
    name: str, changes: dict[str, Any], policy: Policy
) -> None:
    caps = device(name)
    table = TABLES[caps.backend]
    op = make_op(caps.id, **changes)
    planned = decide(op, table, caps, policy)
    if planned.ok:
        final = confirm(planned, make_op(caps.id, **changes), table, device(name), policy)
        assert (final.route, final.entry) == (planned.route, planned.entry)
    else:
        with pytest.raises(RouteMismatch):
            confirm(planned, op, table, caps, policy)


def test_F02_a_second_hardware_test_that_disagrees_is_caught() -> None:
    """The seeded bug: the plan's table lost an architecture test that the final check kept."""
    caps = device("cuda-gtx1070-sm61")
    lying = (row("cuda/attend_portable", Route.NATIVE),)
    honest = (row("cuda/attend_portable", Route.NATIVE, fact_at_least("compute_capability", 75)),)
    planned = decide(make_op(caps.id), lying, caps, ANY)
    assert planned.route is Route.NATIVE
    with pytest.raises(RouteMismatch) as caught:
        confirm(planned, planned.op, honest, caps, ANY)
    text = str(caught.value)
    for part in ("planned native by cuda/attend_portable", "cuda:0", "compute_capability >= 75"):
        assert part in text
    assert "found 61" in text


def test_confirm_may_change_the_entry_but_not_weaken_the_route() -> None:
    cpu = device("cpu-avx2")
    decode = decide(make_op(cpu.id), CPU, cpu)
    assert confirm(decode, make_op(cpu.id, n_q=512), CPU, cpu).entry == "cpu/attend_prefill"

    gpu = device("cuda-gtx1070-sm61")
    native = decide(make_op(gpu.id, n_q=16), CUDA, gpu, ANY)
    with pytest.raises(RouteMismatch) as caught:
        confirm(native, make_op(gpu.id, n_q=17), CUDA, gpu, ANY)
    assert caught.value.final.route is Route.MATERIALIZE
    assert caught.value.planned is native
    materialised = decide(make_op(gpu.id, n_q=17), CUDA, gpu, ANY)
    assert confirm(materialised, make_op(gpu.id, n_q=1), CUDA, gpu, ANY).route is Route.NATIVE
    with pytest.raises(RouteMismatch, match="found mla"):
        confirm(materialised, make_op(gpu.id, attention="mla"), CUDA, gpu, ANY)


def test_confirm_is_about_the_planned_device_and_kind() -> None:
    cpu, pocl = device("cpu-avx2"), device("opencl-pocl")
    planned = decide(make_op(cpu.id), CPU, cpu)
    with pytest.raises(InputError, match="needed attend on cpu:0, as planned"):
        confirm(planned, make_op(pocl.id), OPENCL, pocl, ANY)
    with pytest.raises(InputError, match="found commit on cpu:0"):
        confirm(planned, make_op(cpu.id, kind=OpKind.COMMIT), CPU, cpu)


def test_F19_random_shapes_outside_the_table_are_never_confirmed() -> None:
    table = (row("cpu/attend_x", Route.NATIVE, at_most("n_kv", 4096), feature("avx2")),)
    cpu = device("cpu-avx2")
    planned = decide(make_op(cpu.id), table, cpu, ANY)
    for changes in ({"n_kv": 4097}, {"head_dim_k": 96}, {"head_dim_v": 64}, {"v_type": "f16"}):
        with pytest.raises(RouteMismatch):
            confirm(planned, make_op(cpu.id, **changes), table, cpu, ANY)
