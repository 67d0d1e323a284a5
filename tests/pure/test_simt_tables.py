"""What the shipped tables of cuda, hip and opencl decide on cards that nobody here has."""

from __future__ import annotations

from typing import Any

import pytest
from fake_drivers import ClDevice, Hip, Platform, card, cupy, loader, pyopencl
from hypothesis import given
from hypothesis import strategies as st
from pure_tables import ANY, DEVICES, device, make_op

from kvkernels.backend import BackendStatus
from kvkernels.capabilities import Capability, DeviceCaps, Feature, Route, within
from kvkernels.cli.entries import entry_lines, features_used
from kvkernels.cpu.table import TABLE as CPU
from kvkernels.cuda import table as cuda_table
from kvkernels.cuda.arch import known_to, target
from kvkernels.cuda.probe import probe_cuda
from kvkernels.cuda.table import TABLE as CUDA
from kvkernels.dispatch import Decision, confirm, decide
from kvkernels.errors import RouteMismatch, UnsupportedOp
from kvkernels.hip.families import FAMILIES, GFX, gfx_number, lookup
from kvkernels.hip.library import Libraries
from kvkernels.hip.probe import probe_hip
from kvkernels.hip.table import TABLE as HIP
from kvkernels.memory import LayerSizes
from kvkernels.op import KVARN_BITS, STANDARD_TYPES, LayerSpec, OpKind
from kvkernels.opencl.probe import probe_opencl
from kvkernels.opencl.table import TABLE as OPENCL
from kvkernels.planner import Limits, plan
from kvkernels.simt.local import local_bytes
from kvkernels.simt.table import simt_rows
from kvkernels.storage import Pages

HEADS = (64, 128, 256, 512)
TABLES = {"cuda": CUDA, "hip": HIP, "opencl": OPENCL}
NAMES = sorted(p.stem for p in DEVICES.glob("*.json") if p.stem.partition("-")[0] in TABLES)
#: cards on which no entry may run
REFUSED = {"cuda-k80-sm37": "device.compute_capability", "hip-unknown-gfx1310": "device.family"}
USABLE = [name for name in NAMES if name not in REFUSED]


def with_facts(caps: DeviceCaps, **facts: Any) -> DeviceCaps:
    return DeviceCaps.from_json(caps.to_json() | {"facts": dict(caps.facts) | facts})


def on(caps: DeviceCaps | str, **changes: Any) -> Decision:
    caps = device(caps) if isinstance(caps, str) else caps
    return decide(make_op(caps.id, **changes), TABLES[caps.backend], caps, ANY)


def reasons(decision: Decision) -> dict[str, str]:
    """Id -> text of every reason in a decision."""
    return {r.id: str(r) for row in decision.considered for r in row.reasons}


# ------------------------------------------------------------------ one table


@pytest.mark.parametrize("name", ["cuda", "hip", "opencl", "simt"])
def test_every_backend_has_the_same_rows(name: str) -> None:
    table = TABLES.get(name) or simt_rows("simt")
    portable = [row for row in table if not row.entry.endswith("_mma")]
    assert [(row.entry.partition("/")[2], row.kind, row.route) for row in portable] == [
        ("attend_portable", OpKind.ATTEND, Route.NATIVE),
        ("attend_prefill_portable", OpKind.ATTEND, Route.NATIVE),
        ("attend_materialized", OpKind.ATTEND, Route.MATERIALIZE),
        ("commit", OpKind.COMMIT, Route.NATIVE),
        ("commit_aware", OpKind.COMMIT, Route.NATIVE),
        ("commit_rows", OpKind.COMMIT, Route.NATIVE),
        ("commit_tail", OpKind.TAIL, Route.NATIVE),
        ("materialize", OpKind.MATERIALIZE, Route.NATIVE),
    ]
    assert all(row.entry.startswith(f"{name}/") for row in table)


PAIRS = {
    "attend_portable": "attend_decode",
    "attend_prefill_portable": "attend_prefill",
    "commit": "commit",
    "commit_aware": "commit_aware",
    "commit_rows": "commit_rows",
    "commit_tail": "commit_tail",
    "materialize": "materialize",
}


@pytest.mark.parametrize("entry", PAIRS)
@pytest.mark.parametrize("name", TABLES)
def test_an_entry_asks_of_an_operation_what_the_cpu_asks(name: str, entry: str) -> None:
    def asked(row: Capability) -> list[str]:
        return [need.id for need in row.requires if not need.of_device]

    rows = {row.entry: row for row in (*TABLES[name], *CPU)}
    assert asked(rows[f"{name}/{entry}"]) == asked(rows[f"cpu/{PAIRS[entry]}"])


@pytest.mark.parametrize("asked", ["auto", "f32", "int8", "int16"])
def test_portable_entries_take_every_activation_and_say_what_they_compute_in(asked: str) -> None:
    decision = on("cuda-v100-sm70", activations=asked)
    assert decision.entry == "cuda/attend_portable"
    assert "float32 throughout" in next(r for r in CUDA if r.entry == decision.entry).numerics


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("kind", OpKind)
def test_every_usable_card_serves_every_kind(name: str, kind: OpKind) -> None:
    changes = {"tail_rows": 128, "tail_dtype": "f16"} if kind is OpKind.TAIL else {}
    decision = on(name, kind=kind, **changes)
    if kind is OpKind.COMMIT and "no-fp64" in name:
        assert not decision.ok
        assert "encoders sum in float64" in reasons(decision)["device.fp64"]
    else:
        assert decision.route is Route.NATIVE


def test_without_fp64_standard_rows_are_still_written() -> None:
    caps = device("opencl-gpu-no-fp64")
    rows = {"k_type": "q8_0", "v_type": "q4_0"}
    assert on(caps, kind=OpKind.COMMIT, **rows).entry == "opencl/commit_rows"
    assert on(caps, **rows).entry == "opencl/attend_portable"


@pytest.mark.parametrize("state", [Feature(True, False), Feature(True, None), Feature()])
def test_fp64_counts_only_when_enabled(state: Feature) -> None:
    base = device("opencl-pocl")
    caps = DeviceCaps(
        id=base.id, backend=base.backend, name="x", facts=base.facts, features={"fp64": state}
    )
    for encoder, queries in (("published", "none"), ("aware", "rows")):
        op = {"kind": OpKind.COMMIT, "encoder": encoder, "queries": queries}
        row = on(base, **op).entry
        assert row is not None
        refused = next(c for c in on(caps, **op).considered if c.entry == row)
        assert [r.id for r in refused.reasons] == ["device.fp64"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_card_that_no_entry_serves_says_why_on_every_row(name: str) -> None:
    caps = device(name)
    for row in TABLES[caps.backend]:
        op = make_op(caps.id, kind=row.kind)
        assert REFUSED[name] in [r.id for r in row.unmet(op, caps)]
    lines = entry_lines(TABLES[caps.backend], caps)
    assert all(REFUSED[name] in [r.id for r in line.reasons] for line in lines)


# ------------------------------------------------------------------ V1, F20: CUDA


@pytest.mark.parametrize(
    ("capability", "nvrtc", "ok", "asked"),
    [
        (61, 12040, True, ""),
        (61, 13000, False, "device.nvrtc"),
        (70, 13020, False, "device.nvrtc"),
        (72, 12999, True, ""),
        (72, 13000, False, "device.nvrtc"),
        (52, 12040, True, ""),
        (50, 12040, True, ""),
        (37, 12040, False, "device.compute_capability"),
        (75, 13000, True, ""),
        (75, 12040, True, ""),
        (89, 11030, False, "device.nvrtc"),
        (120, 12080, True, ""),
        (120, 12040, True, ""),
        (90, None, False, "device.nvrtc"),
        (None, 12040, False, "device.compute_capability"),
        ("9.0", 13000, False, "device.compute_capability"),
    ],
)
def test_F20_V1_card_and_compiler(
    capability: object, nvrtc: int | None, ok: bool, asked: str
) -> None:
    caps = with_facts(
        device("cuda-h200-sm90"), compute_capability=capability, nvrtc=nvrtc, target=None
    )
    decision = on(caps)
    assert decision.ok is ok
    assert ok or asked in reasons(decision)


@pytest.mark.parametrize("name", ["cuda-gtx1070-sm61", "cuda-p100-sm60", "cuda-v100-sm70"])
def test_F20_V1_an_old_card_with_cuda_13_is_told_exactly_what_to_install(name: str) -> None:
    assert on(name).entry == "cuda/attend_portable"
    decision = on(with_facts(device(name), nvrtc=13020))
    assert decision.route is Route.REFUSE
    for text in (decision.explain(), decision.hint):
        assert "install cupy-cuda12x, pip install 'kvkernels[cuda12]'" in text


def test_F20_the_probe_and_the_table_agree_about_the_dropped_card() -> None:
    status = probe_cuda(cupy(card(70, b"Tesla V100"), card(75, b"Tesla T4")))
    volta, turing = status.devices
    assert not on(volta).ok
    assert on(turing).ok
    assert "cuda:0 (Tesla V100)" in status.detail
    assert "Tesla T4" not in status.detail
    # Kepler was dropped by CUDA 12 already: another package would not help.
    assert probe_cuda(cupy(card(37, b"Tesla K80"))).detail == ""


@pytest.mark.parametrize(
    ("nvrtc", "capability", "what"),
    [
        (13020, 61, None),
        (13020, 70, None),
        (12040, 61, "sm_61"),
        (12040, 52, "sm_52"),
        (11080, 89, "sm_89"),
        (11030, 89, None),
        (12080, 120, "sm_120"),
        (12040, 120, "compute_90"),
        (13000, 121, "sm_121"),
        (12080, 121, "compute_120"),
        (12040, 37, None),
        (12040, 88, "sm_87"),
        (13000, 72, None),
    ],
)
def test_F20_what_a_compiler_makes_for_a_card(
    nvrtc: int, capability: int, what: str | None
) -> None:
    assert target(capability, nvrtc) == what


def test_F20_newer_compilers_of_a_major_lose_no_card() -> None:
    assert set(known_to(12040)) < set(known_to(12080)) < set(known_to(12090))
    assert min(known_to(13000)) == cuda_table.TURING


TENSOR = (
    "cuda-t4-sm75",
    "cuda-a100-sm80",
    "cuda-rtx4090-sm89",
    "cuda-h200-sm90",
    "cuda-b200-sm100",
)


@pytest.mark.parametrize("n_q", [1, 16, 17])
def test_tensor_core_rows_come_first_where_there_are_tensor_cores(n_q: int) -> None:
    kind = "attend" if n_q <= 16 else "attend_prefill"
    for name in TENSOR:
        assert on(name, n_q=n_q, n_kv=500).entry == f"cuda/{kind}_mma"
        assert on(name, n_q=n_q, n_kv=500, activations="f32").entry == f"cuda/{kind}_portable"
    for name in ("cuda-v100-sm70", "cuda-gtx1070-sm61"):
        assert on(name, n_q=n_q, n_kv=500).entry == f"cuda/{kind}_portable"


def test_tensor_cores_are_for_records() -> None:
    for changes in ({"k_type": "q8_0", "v_type": "q4_0"}, {"bodyless": True}):
        assert on("cuda-h200-sm90", **changes).entry == "cuda/attend_portable"


def test_F01_a_card_without_matrix_units_attends_natively() -> None:
    for dim in (128, 256):
        pair = {"k_type": "kvarn5", "v_type": "kvarn4", "head_dim_k": dim, "head_dim_v": dim}
        decision = on(
            "cuda-gtx1070-sm61", n_q=1024, n_kv=8192, tail_rows=128, tail_dtype="f16", **pair
        )
        assert (decision.route, decision.entry) == (Route.NATIVE, "cuda/attend_prefill_portable")


# ------------------------------------------------------------------ V2, F21, F23: HIP

F21_KNOWN = (
    *("gfx900", "gfx906", "gfx908", "gfx90a", "gfx942"),
    *("gfx1010", "gfx1030", "gfx1100", "gfx1103", "gfx1150"),
    *("gfx1151", "gfx1152", "gfx1153", "gfx1200", "gfx1201"),
)


@pytest.mark.parametrize("gfx", F21_KNOWN)
def test_F21_known_gfx_numbers_have_a_family_and_lanes(gfx: str) -> None:
    known = lookup(gfx)
    assert known is not None
    assert known.lanes == (64 if len(gfx) == 6 else 32)
    assert lookup(f"{gfx}:sramecc+:xnack-") == known


@pytest.mark.parametrize(
    "text", ["gfx1199", "gfx115x", "", "gfx", "gfx11511", "gfx1100 ", "GFX1100", "1100", None]
)
def test_F21_anything_else_is_unknown_and_refused(text: str | None) -> None:
    assert lookup(text) is None
    hip = Hip(text or "", attributes={87: 32})
    (caps,) = probe_hip(Libraries(load=loader(libamdhip64=hip)), {}).devices
    decision = on(caps)
    assert decision.route is Route.REFUSE
    assert "found unknown" in reasons(decision)["device.family"]
    assert "no other card's layout" in reasons(decision)["device.family"]


def test_F21_the_families_of_one_line_stay_apart() -> None:
    assert {lookup(g).family for g in ("gfx1150", "gfx1151", "gfx1152", "gfx1153")} == {"rdna3.5"}  # type: ignore[union-attr]
    assert {known.family for known in GFX.values()} == set(FAMILIES)
    assert all(gfx_number(number) == number for number in GFX)


@pytest.mark.parametrize(
    ("gfx", "hiprtc", "ok"),
    [
        ("gfx1030", 5020, True),
        ("gfx1100", 5020, False),  # this compiler ends the process
        ("gfx1100", 5050, True),
        ("gfx942", 5070, False),
        ("gfx942", 6000, True),
        ("gfx906", 4990, False),
        ("gfx906", None, False),
    ],
)
def test_F20_hip_card_and_compiler(gfx: str, hiprtc: int | None, ok: bool) -> None:
    known = GFX[gfx]
    caps = with_facts(
        device("hip-mi50-gfx906"), gfx=gfx, family=known.family, lanes=known.lanes, hiprtc=hiprtc
    )
    decision = on(caps)
    assert decision.ok is ok
    assert ok or "device.hiprtc" in reasons(decision)


@pytest.mark.parametrize("lanes", [None, 16, 31, 33, 48, 128, "64", True])
def test_F23_a_width_that_no_kernel_is_made_for_is_refused(lanes: object) -> None:
    decision = on(with_facts(device("hip-mi50-gfx906"), lanes=lanes))
    assert decision.route is Route.REFUSE
    assert "device.lanes" in reasons(decision)


def test_F23_a_warp_of_another_width_is_refused() -> None:
    for lanes in (None, 64):
        assert "device.lanes" in reasons(on(with_facts(device("cuda-t4-sm75"), lanes=lanes)))


@pytest.mark.parametrize("name", [n for n in USABLE if n.startswith("hip")])
def test_F23_both_widths_are_served(name: str) -> None:
    caps = device(name)
    assert caps.facts["lanes"] == (32 if "gfx1" in name else 64)
    assert on(caps).entry == "hip/attend_portable"


# ------------------------------------------------------------------ F04, F12: types and shapes


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("n_q", [1, 16, 17, 4096])
def test_F03_F04_every_head_dim_is_native(name: str, dim: int, n_q: int) -> None:
    for tail in (0, 128, 256):
        shape = {"head_dim_k": dim, "head_dim_v": dim, "n_head": 24, "n_kv_head": 4, "n_q": n_q}
        tails = {"tail_rows": tail, "tail_dtype": "f16" if tail else "none"}
        decision = on(name, k_type="kvarn6", v_type="kvarn6", **shape, **tails)
        entry = "attend" if n_q <= 16 else "attend_prefill"
        entry += "_mma" if name in TENSOR else "_portable"
        assert (decision.route, str(decision.entry).partition("/")[2]) == (Route.NATIVE, entry)


def test_F04_a_passed_over_row_says_why() -> None:
    decision = on("hip-rx7900xtx-gfx1100", n_q=512, head_dim_k=256, head_dim_v=256)
    assert [r.id for r in decision.considered[0].reasons] == ["op.n_q"]


@pytest.mark.parametrize("name", NAMES)
def test_F08_F12_every_pair_of_types_is_served_on_its_device_or_refused_there(name: str) -> None:
    caps = device(name)
    for k in (*KVARN_BITS, *STANDARD_TYPES):
        for v in (*KVARN_BITS, *STANDARD_TYPES):
            decision = on(caps, k_type=k, v_type=v)
            assert decision.op.device == caps.id
            assert all(c.entry.startswith(f"{caps.backend}/") for c in decision.considered)
            mixed = (k in KVARN_BITS) != (v in KVARN_BITS)
            assert decision.ok is (name in USABLE and not mixed), (k, v)


# ------------------------------------------------------------------ F11, F25: limits

LIMITS = ("max_threads", "local_memory", "max_alloc", "compute_capability", "compiler", "hiprtc")
EDGES = (50, 75, 80, 128, 1020, 5000, 5050, 16384, 32768, 65536, 1 << 20)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fact", LIMITS)
def test_F11_a_larger_limit_never_serves_less(name: str, fact: str) -> None:
    caps = device(name)
    if fact not in caps.facts:
        return
    for changes in (
        {},
        {"n_q": 512, "head_dim_k": 512, "head_dim_v": 512},
        {"max_offset": 1 << 15},
    ):
        values = sorted({v + d for v in EDGES for d in (-1, 0, 1)} | {2 * v for v in EDGES})
        served = [on(with_facts(caps, **{fact: v}), **changes).ok for v in values]
        assert served == sorted(served), (changes, fact)


@pytest.mark.parametrize("limit", [16384, 32767, 32768, 49152, 65536, 101376, 232448])
@pytest.mark.parametrize("name", ["cuda-h200-sm90", "hip-mi50-gfx906", "opencl-gpu-32k-local"])
def test_F25_local_memory_is_asked_with_both_numbers(name: str, limit: int) -> None:
    caps = with_facts(device(name), local_memory=limit)
    for row in TABLES[caps.backend]:
        for dim in (64, 128, 256, 512):
            op = make_op(caps.id, kind=row.kind, head_dim_k=dim, head_dim_v=dim)
            needs = local_bytes(row.entry, op)
            found = [r.found for r in row.unmet(op, caps) if r.id == "op.local_bytes"]
            assert found == ([] if needs <= limit else [f"{needs} > {limit}"])


def test_F25_what_an_entry_needs_is_its_own_and_what_every_gpu_has() -> None:
    for row in (*CUDA, *HIP, *OPENCL):
        name = row.entry.partition("/")[2]
        kvarn = [local_bytes(row.entry, make_op("x:0", head_dim_k=d, head_dim_v=d)) for d in HEADS]
        assert all(576 <= size <= 32768 for size in kvarn), row.entry
        if name == "attend_portable":
            assert kvarn == [13508] * 4
        if name == "attend_prefill_portable":
            assert kvarn == [26916, 26916, 13508, 13508]
        if name == "commit_aware":
            assert kvarn == [25600] * 4


def test_F25_a_head_of_many_channels_needs_room_to_be_merged() -> None:
    sizes = [
        local_bytes("x/attend_portable", make_op("x:0", k_type="f16", v_type="f16", head_dim_v=dim))
        for dim in (1024, 4096)
    ]
    assert sizes == [13508, 16384]


@pytest.mark.parametrize("limit", [16384, 20000, 24576, 32768])
def test_F25_a_card_with_less_serves_less_and_says_what_it_lacks(limit: int) -> None:
    caps = with_facts(device("opencl-pocl"), local_memory=limit)
    assert on(caps).entry == "opencl/attend_portable"
    assert on(caps, kind=OpKind.COMMIT).ok is (limit >= 16640)
    lacks = reasons(on(caps, kind=OpKind.COMMIT, encoder="aware", queries="rows"))
    assert ("op.local_bytes" in lacks) is (limit < 25600)


def test_F25_unknown_local_memory_is_no() -> None:
    decision = on(with_facts(device("cuda-t4-sm75"), local_memory=None))
    assert "unknown local_memory" in reasons(decision)["op.local_bytes"]


def test_F25_the_probe_reports_a_card_with_too_little_as_not_available() -> None:
    caps = with_facts(device("cuda-t4-sm75"), local_memory=4096)
    for line in entry_lines(CUDA, caps):
        assert "op.local_bytes" in [r.id for r in line.reasons]
    full = entry_lines(CUDA, device("cuda-t4-sm75"))
    assert {r.id for line in full for r in line.reasons} == {"policy.unqualified"}


def test_encoders_need_a_larger_work_group_than_attention() -> None:
    caps = with_facts(device("opencl-pocl"), max_threads=128)
    assert on(caps, kind=OpKind.MATERIALIZE).ok
    for encoder, queries in (("published", "none"), ("aware", "rows")):
        refused = on(caps, kind=OpKind.COMMIT, encoder=encoder, queries=queries)
        assert "needs max_threads >= 256; found 128" in reasons(refused)["device.max_threads"]
    assert on(caps, kind=OpKind.COMMIT, k_type="q8_0", v_type="q4_0").ok


def test_a_small_work_group_is_refused() -> None:
    assert (
        "found 64"
        in reasons(on(with_facts(device("opencl-pocl"), max_threads=64)))["device.max_threads"]
    )
    assert on(with_facts(device("opencl-pocl"), max_threads=128)).ok


def test_opencl_one_buffer_is_at_most_what_the_device_allows() -> None:
    caps = device("opencl-gpu-32k-local")
    limit = caps.facts["max_alloc"]
    assert isinstance(limit, int)
    assert on(caps, max_offset=limit).ok
    refused = on(caps, max_offset=limit + 1)
    assert f"{limit + 1} > {limit}" in reasons(refused)["op.max_offset"]
    assert on("cuda-t4-sm75", max_offset=1 << 40).ok  # 64-bit offsets, no such limit


@pytest.mark.parametrize("bits", [32, None])
def test_opencl_needs_64_bit_addresses(bits: int | None) -> None:
    assert "device.address_bits" in reasons(
        on(with_facts(device("opencl-pocl"), address_bits=bits))
    )


# ------------------------------------------------------------------ F02: plan and final operation


class Planned:
    """As much of a device as a plan needs."""

    transient_bytes = 0

    def __init__(self, caps: DeviceCaps) -> None:
        self.caps, self.table = caps, TABLES[caps.backend]

    def workspace_bytes(self, layers: Any, steps: Any) -> int:
        return 0


@pytest.mark.parametrize("name", USABLE)
@given(
    n_q=st.sampled_from([1, 2, 16, 17, 512]),
    pair=st.sampled_from([("kvarn5", "kvarn4"), ("kvarn2", "kvarn8"), ("q8_0", "q4_0")]),
    dim=st.sampled_from([64, 128, 256, 512]),
    tail=st.sampled_from([0, 256]),
)
def test_F02_what_a_plan_accepts_the_final_operation_accepts(
    name: str, n_q: int, pair: tuple[str, str], dim: int, tail: int
) -> None:
    caps = device(name)
    table = TABLES[caps.backend]
    layer = LayerSpec(
        n_head=8, n_kv_head=2, head_dim=dim, k=pair[0], v=pair[1], encoder="published", tail=tail
    )
    limits = Limits(n_ctx=2048, n_ubatch=512)
    if "no-fp64" in name and layer.is_kvarn:
        with pytest.raises(UnsupportedOp, match=r"device\.fp64"):
            plan([layer], Planned(caps), limits, ANY)  # type: ignore[arg-type]
        return
    made = plan([layer], Planned(caps), limits, ANY)  # type: ignore[arg-type]
    planned = made.layers[0]
    sizes = made.memory
    records = max(sizes.kv_k_payload_bytes, sizes.kv_v_payload_bytes)
    op = made.op(0, n_q=n_q)
    assert op.max_offset >= records  # what the step will say at most
    final = confirm(planned.planned(n_q), op, table, caps, ANY)
    assert final.route is Route.NATIVE


def test_F02_a_buffer_over_the_limit_is_refused_by_the_plan_and_not_by_the_first_step() -> None:
    caps = device("opencl-gpu-32k-local")
    layer = LayerSpec(n_head=32, n_kv_head=32, head_dim=512, encoder="published")
    small, large = Limits(n_ctx=1024), Limits(n_ctx=1 << 20)
    made = plan([layer], Planned(caps), small, ANY)  # type: ignore[arg-type]
    sizes = {d.op.max_offset for d in made.layers[0].decisions} | {made.op(0).max_offset}
    assert len(sizes) == 1  # attention and commit are asked about the same buffers
    assert 0 < sizes.pop() < 1 << 30
    with pytest.raises(UnsupportedOp, match=r"op\.max_offset.*max_alloc"):
        plan([layer], Planned(caps), large, ANY)  # type: ignore[arg-type]


def test_F02_the_largest_buffer_of_a_layer_may_be_any_of_its_kinds() -> None:
    sizes = LayerSizes(k_slot=5, v_slot=7, kv_block=2, q_block=11, k_ring=3, v_ring=13)
    assert sizes.largest(Pages(slots=10, blocks=1, rings=1)) == 70
    assert sizes.largest(Pages(slots=1, blocks=10, rings=1)) == 110
    assert sizes.largest(Pages(slots=1, blocks=1, rings=10)) == 130


def test_F02_a_final_check_that_knows_less_of_the_card_is_caught() -> None:
    caps = device("opencl-pocl")
    planned = on(caps)
    stricter = simt_rows("opencl", (within("scratch_bytes", "no_such_fact"),))
    with pytest.raises(RouteMismatch, match="unknown no_such_fact"):
        confirm(planned, planned.op, stricter, caps, ANY)


# ------------------------------------------------------------------ the files


@pytest.mark.parametrize("name", NAMES)
def test_a_device_file_has_the_facts_that_a_probe_gives(name: str) -> None:
    probes: dict[str, BackendStatus] = {
        "cuda": probe_cuda(cupy(card())),
        "hip": probe_hip(Libraries(load=loader(libamdhip64=Hip("gfx906"))), {}),
        "opencl": probe_opencl(pyopencl(Platform(ClDevice()))),
    }
    caps = device(name)
    (probed,) = probes[caps.backend].devices
    assert set(caps.facts) == set(probed.facts)
    assert set(caps.features) == set(probed.features)
    assert caps.source == "synthetic"
    assert caps.qualified == {}


def test_a_probe_marks_what_the_table_asks_for_as_used() -> None:
    asked = {"fp64", "max_threads", "local_memory"}
    assert features_used(simt_rows("simt")) == asked
    assert features_used(OPENCL) == asked | {"compiler", "address_bits", "max_alloc"}
