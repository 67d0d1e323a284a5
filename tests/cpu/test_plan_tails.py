"""Tails through ``kvk.plan``: requests, what layers keep, bytes and the log (T1-T5, T8, T9, T12,
T13, A3).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cache_tools import spec

import kvkernels as kvk
from kvkernels import errors
from kvkernels.backend import Device
from kvkernels.capabilities import Capability, equal, one_of
from kvkernels.errors import InputError, RequestError
from kvkernels.op import STANDARD_TYPES, OpKind
from kvkernels.planner import Plan
from kvkernels.records.layout import BITS
from kvkernels.request import Representation, ResolvedTail, TailRequest
from kvkernels.storage import Body, Storage

NONE, STAGE = Representation.NONE, Representation.STAGE
OVERLAY, NATIVE_EXACT = Representation.OVERLAY, Representation.NATIVE_EXACT


class StandIn:
    """The CPU with another table, which counts what is allocated and what is run."""

    def __init__(self, device: Device, table: Sequence[Capability] | None = None) -> None:
        self._device = device
        self.table = tuple(device.table if table is None else table)
        self.allocated = self.launches = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def allocate(self, *args: Any, **how: Any) -> Any:
        self.allocated += 1
        return self._device.allocate(*args, **how)

    def run(self, entry: str, op: Any, call: Any) -> None:
        self.launches += 1
        self._device.run(entry, op, call)


def without_bf16(table: Sequence[Capability], *kinds: OpKind) -> tuple[Capability, ...]:
    """The table in which the rows of these kinds take no bf16 tail."""
    f16_only = one_of("tail_dtype", ("none", "f16"))

    def changed(row: Capability) -> Capability:
        if row.kind not in kinds:
            return row
        needs = (f16_only if need.id == f16_only.id else need for need in row.requires)
        return replace(row, requires=tuple(needs))

    found = tuple(changed(row) for row in table)
    assert any(a.requires != b.requires for a, b in zip(found, table, strict=True))
    return found


def without_tails(table: Sequence[Capability]) -> tuple[Capability, ...]:
    return tuple(row for row in table if row.kind is not OpKind.TAIL)


def plan(device: Any, *layers: kvk.LayerSpec, tail: Any = None, **limits: Any) -> Plan:
    base: dict[str, Any] = {"n_ctx": 2048, "n_ubatch": 256}
    return kvk.plan(layers, device, kvk.Limits(**(base | limits)), tail=tail)


def standard(**changes: Any) -> kvk.LayerSpec:
    return spec(**({"k": "q8_0", "v": "q4_0"} | changes))


def swa(window: int = 512, **changes: Any) -> kvk.LayerSpec:
    return standard(window=window, **changes)


def storages(made: Plan) -> list[Storage]:
    return [layer.storage for layer in made.layers]


def refused(device: Device, layers: Sequence[kvk.LayerSpec], tail: Any, **limits: Any) -> str:
    """The text of the refusal; nothing was allocated or run."""
    stand_in = StandIn(device)
    with pytest.raises(RequestError) as caught:
        plan(stand_in, *layers, tail=tail, **limits)
    assert (stand_in.allocated, stand_in.launches) == (0, 0)
    return str(caught.value)


# --- T1: requests

# Layer 0 slides, so that canonical order is not the order of roles.
MODEL = (swa(), standard(), swa(), standard())


@pytest.mark.parametrize(
    ("tail", "rows"),
    [
        (None, [0, 0]),
        ("", [0, 0]),
        ("0", [0, 0]),
        ("auto", [512, 1024]),
        ("100", [100, 100]),
        ("64,300", [64, 300]),
        ("full=300,swa=64", [64, 300]),
        ("swa@l0=64,full@l1=300", [64, 300]),
        ("swa=0,full@l1=300", [0, 300]),
        (TailRequest.parse("64,300"), [64, 300]),
    ],
)
def test_T1_every_form_reaches_the_layers(device: Device, tail: Any, rows: list[int]) -> None:
    made = plan(device, *MODEL, tail=tail)
    assert [t.group.id for t in made.tails] == ["swa@l0", "full@l1"]
    assert [t.group.layers for t in made.tails] == [(0, 2), (1, 3)]
    assert [t.effective for t in made.tails] == rows
    assert [s.tail_rows for s in storages(made)] == rows * 2


def test_T1_one_request_serves_several_models_and_contexts(device: Device) -> None:
    request = TailRequest.parse("auto", "f16")
    before = hash(request), str(request)
    long, short = plan(device, *MODEL, tail=request), plan(device, spec(), tail=request, n_ctx=300)
    assert [t.effective for t in long.tails] == [512, 1024]
    assert [t.effective for t in short.tails] == [300]
    assert {t.dtype for t in long.tails + short.tails} == {"f16"}
    assert (hash(request), str(request)) == before


def test_T1_layers_may_say_it_themselves(device: Device) -> None:
    layers = (swa(tail=64), standard(tail=300), swa(tail=64), standard(tail=300))
    own, named = plan(device, *layers), plan(device, *MODEL, tail="full=300,swa=64")
    assert storages(own) == storages(named)
    assert own.memory == named.memory
    # A group without a word about it gets none.
    assert [t.effective for t in plan(device, swa(tail=64), standard()).tails] == [64, 0]
    dtyped = plan(device, swa(tail=64, tail_dtype="f16"), standard(tail=9, tail_dtype="f16"))
    assert [s.tail_dtype for s in storages(dtyped)] == ["f16", "f16"]


def test_T1_layers_and_a_request_exclude_each_other(device: Device) -> None:
    for layer in (standard(tail=64), standard(tail_dtype="f16")):
        text = refused(device, [swa(), layer], "100")
        assert "tail: found '100' besides the tail of layer 1; needed one of the two" in text
        assert "LayerSpec(tail=..)" in text
        # Even a request for nothing is one.
        assert "besides the tail of layer 1" in refused(device, [swa(), layer], "")


def test_T1_layers_of_one_group_must_agree(device: Device) -> None:
    text = refused(device, [standard(tail=64), swa(tail=1), standard(tail=65)], None)
    assert "tail: found 64, 65 rows in layers of full@l0; needed one number for layers" in text
    text = refused(device, [standard(tail=64), standard()], None)
    assert "found 0, 64 rows in layers of full@l0" in text


def test_T1_layers_must_agree_about_the_dtype(device: Device) -> None:
    layers = [standard(tail=64, tail_dtype="f16"), swa(tail=64, tail_dtype="bf16")]
    text = refused(device, layers, None)
    assert "tail_dtype: found bf16, f16; needed one for all layers with a tail" in text
    assert "None, f16" in refused(device, [standard(tail=64), swa(tail=9, tail_dtype="f16")], None)


@pytest.mark.parametrize(
    ("tail", "says"),
    [
        ("512,swa=512", ["'512' in '512,swa=512'", "name=N in every entry, or in none"]),
        ("full=1,full=2", ["'full' a second time", "every name once"]),
        ("full=1,full@l1=2,swa=1", ["full@l1 twice, as 'full' and as 'full@l1'"]),
        ("fulll=1,swa=1", ["unknown 'fulll'", "swa, full, swa@l0, full@l1", "mean 'full'?"]),
        ("full=1", ["nothing for swa@l0 in 'full=1'", "every group once: swa@l0, full@l1"]),
        ("1,2,3", ["3 counts in '1,2,3'", "2, one for each of swa@l0, full@l1"]),
        ("4294967296", ["'4294967296'", "0..4294967295"]),
        ("full=99999999999,swa=1", ["'99999999999' in the entry 'full=99999999999'"]),
        ("-1", ["'-1'", "0..4294967295"]),
        ("1.5", ["'1.5'", "a whole number of rows"]),
        ("auto,1", ["'auto'", "did you mean 'auto'?"]),
        ("full=auto,swa=1", ["'auto' in the entry 'full=auto'", "a whole number of rows"]),
        ("all", ["'all'", "'', 'auto', 'N', 'N0,N1' or 'full=N,swa=N'"]),
        (1024, ["found 1024", "text: '', 'auto', 'N'"]),
    ],
)
def test_T1_a_bad_request_names_the_entry_and_what_is_valid(
    device: Device, tail: Any, says: list[str]
) -> None:
    text = refused(device, MODEL, tail)
    assert text.startswith("tail: found ")
    for part in says:
        assert part in text


def test_T1_a_role_of_several_groups_is_ambiguous(device: Device) -> None:
    layers = [swa(512), standard(), swa(1024)]
    text = refused(device, layers, "full=1,swa=1")
    assert "'swa', which stands for 2 groups; needed one of swa@l0, swa@l2" in text
    made = plan(device, *layers, tail="full=1,swa@l0=2,swa@l2=3")
    assert [t.effective for t in made.tails] == [2, 1, 3]


@pytest.mark.parametrize("dtype", ["f32", "q8_0", "F16"])
def test_T1_other_types_of_exact_rows_are_refused(device: Device, dtype: str) -> None:
    with pytest.raises(RequestError, match=r"tail dtype: found .*needed f16 or bf16"):
        TailRequest.parse("auto", dtype)
    with pytest.raises(RequestError, match=r"tail_dtype: found .*needed one of f16, bf16"):
        standard(tail=64, tail_dtype=dtype)


@pytest.mark.parametrize("tail", [-1, 1.5, True, "64", None])
def test_T1_a_layer_counts_in_whole_rows(tail: Any) -> None:
    with pytest.raises(InputError, match="tail: found"):
        standard(tail=tail)


def test_T1_a_model_without_layers_has_no_tail(device: Device) -> None:
    stand_in = StandIn(device)
    for tail in (None, "", "auto", "full=1"):
        with pytest.raises(InputError, match="layers: found none; needed at least one LayerSpec"):
            plan(stand_in, tail=tail)
    assert stand_in.allocated == 0


def test_T1_a_huge_request_is_the_context(device: Device) -> None:
    (tail,) = plan(device, standard(), tail="4294967295").tails
    assert (tail.raw, tail.effective) == (2**32 - 1, 2048)


# --- T2, T3: what is kept


def exact(k: str, v: str) -> Storage:
    return Storage(body=Body.TILES, k=k, v=v)


def ring(body: Body, k: str, v: str, rows: int, dtype: str, reserve: int = 8) -> Storage:
    return Storage(body=body, k=k, v=v, tail_rows=rows, reserve=reserve, tail_dtype=dtype)


RECORDS, TILES, BARE = Body.RECORDS, Body.TILES, Body.NONE
MIXED = {"k": "f16", "v": "q4_0"}

KEPT: list[tuple[kvk.LayerSpec, str, tuple[int, int], str | None, Representation, Storage]] = [
    # layer, request, (requested, effective), dtype, representation, storage
    (standard(), "", (0, 0), None, NONE, exact("q8_0", "q4_0")),
    (standard(), "100", (100, 100), "bf16", OVERLAY, ring(TILES, "q8_0", "q4_0", 100, "bf16")),
    (standard(), "2047", (2047, 2047), "bf16", OVERLAY, ring(TILES, "q8_0", "q4_0", 2047, "bf16")),
    (standard(), "2048", (2048, 2048), "bf16", NATIVE_EXACT, exact("bf16", "bf16")),
    (standard(), "9999", (9999, 2048), "bf16", NATIVE_EXACT, exact("bf16", "bf16")),
    (swa(), "511", (511, 511), "bf16", OVERLAY, ring(TILES, "q8_0", "q4_0", 511, "bf16")),
    (swa(), "512", (512, 512), "bf16", NATIVE_EXACT, ring(BARE, "bf16", "bf16", 512, "bf16")),
    (swa(), "600", (600, 512), "bf16", NATIVE_EXACT, ring(BARE, "bf16", "bf16", 512, "bf16")),
    (spec(), "", (128, 128), "f16", STAGE, Storage(body=RECORDS, k="kvarn3", v="kvarn5")),
    (spec(), "128", (128, 128), "f16", STAGE, Storage(body=RECORDS, k="kvarn3", v="kvarn5")),
    (spec(), "129", (256, 256), "f16", OVERLAY, ring(RECORDS, "kvarn3", "kvarn5", 256, "f16")),
    (spec(), "1024", (1024, 1024), "f16", OVERLAY, ring(RECORDS, "kvarn3", "kvarn5", 1024, "f16")),
    (spec(), "2000", (2048, 2048), "f16", NATIVE_EXACT, exact("f16", "f16")),
    (spec(window=300), "129", (256, 256), "f16", OVERLAY,
     ring(RECORDS, "kvarn3", "kvarn5", 256, "f16")),
    (spec(window=300), "257", (300, 300), "f16", NATIVE_EXACT,
     ring(BARE, "f16", "f16", 300, "f16")),
    # Its own 128 rows cover a small window, asked for or not.
    (spec(window=100), "", (100, 100), "f16", NATIVE_EXACT, ring(BARE, "f16", "f16", 100, "f16")),
    # A side that is exact already keeps its type; a body that is exact on both needs no ring.
    (standard(**MIXED), "100", (100, 100), "bf16", OVERLAY,
     ring(TILES, "f16", "q4_0", 100, "bf16")),
    (standard(**MIXED), "2048", (2048, 2048), "bf16", NATIVE_EXACT, exact("f16", "bf16")),
    (swa(**MIXED), "512", (512, 512), "bf16", NATIVE_EXACT, ring(BARE, "f16", "bf16", 512, "bf16")),
    (standard(k="f32", v="f16"), "100", (100, 100), "bf16", OVERLAY, exact("f32", "f16")),
    (standard(k="f32", v="bf16"), "4096", (4096, 2048), "bf16", NATIVE_EXACT,
     exact("f32", "bf16")),
    (swa(k="f32", v="f16"), "512", (512, 512), "bf16", NATIVE_EXACT,
     ring(BARE, "f32", "f16", 512, "bf16")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "tail", "rows", "dtype", "representation", "storage"),
    KEPT,
    ids=[f"{s.k}-{s.v}-{s.window}-{tail or 'off'}" for s, tail, *_ in KEPT],
)
def test_T2_T3_what_is_kept(
    device: Device,
    layer: kvk.LayerSpec,
    tail: str,
    rows: tuple[int, int],
    dtype: str | None,
    representation: Representation,
    storage: Storage,
) -> None:
    made = plan(device, layer, tail=tail, rollback=8)
    (found,) = made.tails
    assert (found.requested, found.effective) == rows
    assert (found.dtype, found.representation) == (dtype, representation)
    assert storages(made) == [storage]
    (planned,) = made.layers
    assert (planned.commit is None) == (storage.body is Body.NONE)
    assert (planned.tail is None) == (not storage.tail_rows)
    if storage.body is Body.TILES:
        assert planned.commit is not None
        assert planned.commit.entry == "cpu/commit_rows"


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("layer", [spec(), standard(), swa()], ids=["kvarn", "standard", "swa"])
def test_T4_an_explicit_dtype_is_what_the_ring_holds(
    device: Device, layer: kvk.LayerSpec, dtype: str
) -> None:
    made = plan(device, layer, tail=TailRequest.parse("512", dtype))
    (storage,) = storages(made)
    assert storage.ring_types == (dtype, dtype)
    assert made.tails[0].warnings == ()
    buffers = made.allocate().buffers[0]
    assert buffers.k_ring.nbytes == 2 * 64 * 2 * -(-513 // 64) * 64


@pytest.mark.parametrize(("rollback", "reserve"), [(0, 1), (1, 1), (17, 17)])
def test_T8_the_reserve_is_the_requirement_and_at_least_1(
    device: Device, rollback: int, reserve: int
) -> None:
    for n_ubatch, verify in ((1, 1), (512, 16), (2048, 64)):
        made = plan(
            device, spec(), swa(), tail="512", rollback=rollback, n_ubatch=n_ubatch, verify=verify
        )
        assert [s.reserve for s in storages(made)] == [reserve, reserve]
        assert [s.capacity for s in storages(made)] == [512 + reserve] * 2
        assert [t.rollback for t in made.tails] == [reserve, reserve]


# --- T4, T5: what a device lacks


@pytest.mark.parametrize(
    ("kinds", "operation"),
    [
        ((OpKind.TAIL,), "no K/V body and exact write"),
        ((OpKind.ATTEND,), "no native attached-tail attention"),
        ((OpKind.TAIL, OpKind.ATTEND),
         "no K/V body and exact write, no native attached-tail attention"),
    ],
)  # fmt: skip
def test_T4_automatic_bf16_falls_to_f16_once_per_group_and_explicit_bf16_fails(
    device: Device, kinds: tuple[OpKind, ...], operation: str
) -> None:
    stand_in = StandIn(device, without_bf16(device.table, *kinds))
    made = plan(stand_in, *MODEL * 2, spec(), tail="256")
    assert [t.dtype for t in made.tails] == ["f16", "f16", "f16"]
    assert {s.tail_dtype for s in storages(made)} == {"f16"}
    for tail in made.tails[:2]:
        (note,) = tail.warnings
        assert note.id == "tail.dtype"
        assert f"{tail.group.id}: f16 instead of bf16: {operation} (cpu:0, q8_0/q4_0" in note.text
        assert made.summary().count(note.text) == 1
    assert made.tails[2].warnings == ()  # records never ask for bf16 by themselves

    with pytest.raises(RequestError) as caught:
        plan(stand_in, *MODEL, tail=TailRequest.parse("256", "bf16"))
    text = str(caught.value)
    assert text.startswith("tail dtype: found overlay tail of swa@l0 (layers 0, 2), bf16: ")
    assert operation in text
    assert text.endswith("needed a complete route. f16 has one")
    with pytest.raises(RequestError, match=r"full@l0 \(layers 0\), bf16: no .*f16 has one"):
        plan(stand_in, spec(), tail=TailRequest.parse("256", "bf16"))
    assert stand_in.allocated == 0
    # An explicit f16 is none of this.
    assert plan(stand_in, *MODEL, tail=TailRequest.parse("256", "f16")).tails[0].warnings == ()


def test_T4_a_cache_that_fell_to_f16_holds_f16(device: Device) -> None:
    stand_in = StandIn(device, without_bf16(device.table, OpKind.TAIL))
    cache = plan(stand_in, standard(), tail="64", n_ctx=256).allocate()
    assert stand_in.allocated == 1
    assert cache.stored[0] == plan(device, standard(tail=64, tail_dtype="f16")).stored(0)


@pytest.mark.parametrize("value", [None, "", "0"])
def test_T5_a_device_without_tail_entries_keeps_nothing_but_the_intrinsic_rows(
    device: Device, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("KVK_TAIL_ALLOW_GENERIC", raising=False)
    if value is not None:
        monkeypatch.setenv("KVK_TAIL_ALLOW_GENERIC", value)
    stand_in = StandIn(device, without_tails(device.table))
    made = plan(stand_in, standard(), spec(), swa(), tail="512")
    assert [(t.raw, t.effective, t.dtype) for t in made.tails] == [
        (512, 0, None), (512, 128, "f16"), (512, 0, None),
    ]  # fmt: skip
    assert [t.representation for t in made.tails] == [NONE, STAGE, NONE]
    assert [s.tail_rows for s in storages(made)] == [0, 0, 0]
    for tail in made.tails:
        (note,) = tail.warnings
        assert note.id == "tail.gate"
        assert note.text in made.summary()
        assert "512 rows asked for and no device with a native tail entry" in note.text
    assert made.memory == plan(device, standard(), spec(), swa()).memory
    made.allocate()


@pytest.mark.parametrize("value", ["1", "yes"])
def test_T5_allowed_generic_tails_are_refused_where_no_generic_route_exists(
    device: Device, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """The override lifts the gate, not the need for a route: nothing writes the rows, so what is
    asked for cannot be served, and the plan says so instead of keeping less.
    """
    monkeypatch.setenv("KVK_TAIL_ALLOW_GENERIC", value)
    stand_in = StandIn(device, without_tails(device.table))
    for layer in (standard(), spec(), swa()):
        with pytest.raises(RequestError, match=r"tail dtype: .*no K/V body and exact write") as no:
            plan(stand_in, layer, tail="512")
        assert "needed a complete route" in str(no.value)
    # What lies in the stage anyway needs no route.
    made = plan(stand_in, spec(), tail="100")
    assert [t.representation for t in made.tails] == [STAGE]
    assert made.tails[0].warnings[0].id == "tail.gate"
    assert stand_in.allocated == 0
    plan(stand_in, standard(), spec()).allocate()


def test_T5_a_small_window_of_records_stays_in_the_stage_without_tail_entries(
    device: Device,
) -> None:
    stand_in = StandIn(device, without_tails(device.table))
    (tail,) = plan(stand_in, spec(window=100)).tails
    assert (tail.effective, tail.representation, tail.notes) == (100, STAGE, ())


# --- A3, T12


@pytest.mark.parametrize("layer", [standard(), spec()], ids=["standard", "kvarn"])
def test_A3_a_tail_on_mla_names_layer_group_and_rows_F05(
    device: Device, layer: kvk.LayerSpec
) -> None:
    mla = replace(layer, attention="mla")
    for tail, rows in (("256", 256), ("auto", 1024), ("swa=0,full=7", 7)):
        text = refused(device, [swa(), layer, mla, mla], tail)
        assert f"a tail of {rows} rows for full@l1 with K-only layer 2, 3" in text
        assert "needed 0 for a group with MLA layers" in text
    text = refused(device, [replace(mla, tail=64)], None)
    assert "a tail of 64 rows for full@l0 with K-only layer 0" in text
    # The session goes on: a valid request right after it works.
    assert plan(device, swa(), layer, tail="256").allocate().length(0) == 0


def test_A3_mla_without_a_tail_is_refused_by_the_table(device: Device) -> None:
    stand_in = StandIn(device)
    layers = (standard(), spec(attention="mla"), standard(attention="mla"))
    with pytest.raises(errors.UnsupportedOp) as caught:
        plan(stand_in, *layers)
    assert caught.value.labels == ("layers 1", "layers 2")
    assert "K-only (MLA) attention has no V of its own to keep" in str(caught.value)
    assert stand_in.allocated == 0


def test_T12_a_draft_beside_a_target_with_a_tail_gets_none(device: Device) -> None:
    request = TailRequest.parse("full=512", "bf16")
    target = plan(device, standard(), tail=request)
    drafts = plan(device, spec(), standard(), tail=request.for_draft())
    assert [t.effective for t in target.tails] == [512]
    assert [(t.raw, t.effective) for t in drafts.tails] == [(0, 128), (0, 0)]
    assert not any(s.tail_rows for s in storages(drafts))
    assert drafts.memory == plan(device, spec(), standard()).memory


# --- T8, T9: bytes


@pytest.mark.parametrize("n_seq", [1, 2, 5])
@pytest.mark.parametrize(
    ("layer", "tail", "rows", "row_bytes"),
    [
        (spec(), "200", 256, 2 * (64 + 64) * 2),
        (standard(head_dim_v=128), "200", 200, 2 * (64 + 128) * 2),
        (standard(**MIXED), "200", 200, 2 * (64 + 64) * 2),
        (swa(k="f32", v="q4_0"), "512", 512, 2 * (64 * 4 + 64 * 2)),
        (spec(window=300), "300", 300, 2 * (64 + 64) * 2),
    ],
    ids=["records", "tiles", "mixed", "bare f32", "bare"],
)
def test_T8_ring_bytes(
    device: Device, layer: kvk.LayerSpec, tail: str, rows: int, row_bytes: int, n_seq: int
) -> None:
    found = set()
    for n_ubatch in (1, 64, 1024):
        made = plan(device, layer, layer, tail=tail, rollback=9, n_seq=n_seq, n_ubatch=n_ubatch)
        memory = made.memory
        assert memory.kv_exact_history_bytes == 2 * n_seq * rows * row_bytes
        assert memory.kv_rollback_reserve_bytes == 2 * n_seq * 9 * row_bytes
        # K rows lie channel by channel, padded to whole vectors of 64 rows.
        wide = 4 if layer.k == "f32" else 2
        padding = -(-(rows + 9) // 64) * 64 - (rows + 9)
        assert memory.kv_padding_bytes == 2 * n_seq * padding * 2 * 64 * wide
        buffers = made.allocate().buffers
        rings = sum(b.k_ring.nbytes + b.v_ring.nbytes for b in buffers)
        assert rings == (
            memory.kv_exact_history_bytes
            + memory.kv_rollback_reserve_bytes
            + memory.kv_padding_bytes
        )
        found.add(rings)
    assert len(found) == 1


def test_T3_the_intrinsic_tail_takes_no_history_bytes(device: Device) -> None:
    for tail in (None, "", "1", "128"):
        memory = plan(device, spec(), tail=tail, n_seq=3).memory
        assert memory.kv_exact_history_bytes == memory.kv_rollback_reserve_bytes == 0
        assert memory.kv_padding_bytes == 0
        assert memory == plan(device, spec(), n_seq=3).memory


@pytest.mark.parametrize(
    "layer", [spec(window=300), swa(300), swa(300, k="f32", v="q5_0")], ids=["kvarn", "q", "f32"]
)
def test_T9_a_covered_window_has_neither_body_nor_stage(
    device: Device, layer: kvk.LayerSpec
) -> None:
    for tail, bare in (("299" if not layer.is_kvarn else "256", False), ("300", True)):
        made = plan(device, layer, tail=tail, n_seq=2, rollback=4)
        memory, buffers = made.memory, made.allocate().buffers[0]
        body = memory.kv_k_payload_bytes + memory.kv_v_payload_bytes + memory.kv_staging_bytes
        kept = [buffers.k_records, buffers.v_records, buffers.k_exact, buffers.v_exact]
        assert sum(a.nbytes for a in kept) == body
        assert (body == 0) == bare
        assert made.log[0].body_rows == (0 if bare else 300)
        if bare:
            assert made.layers[0].storage.capacity == 304
            assert (buffers.slots, buffers.blocks, buffers.pages.rings) == (0, 0, 2)


def test_T9_a_covered_full_group_is_a_plain_exact_cache(device: Device) -> None:
    for layer, dtype in ((spec(sink_tokens=128), "f16"), (standard(), "bf16")):
        made = plan(device, layer, tail="2048", n_seq=2, rollback=9)
        same = plan(device, spec(k=dtype, v=dtype), n_seq=2, rollback=9)
        assert made.memory == same.memory
        assert made.tails[0].representation is NATIVE_EXACT
        (line,) = made.log
        assert (line.history_rows, line.rollback_rows, line.tail_bytes) == (0, 0, 0)


# --- T13: the log


def test_T13_the_log_as_data(device: Device) -> None:
    layers = (swa(), spec(), standard(), swa(), spec(), standard(v="q8_0"))
    made = plan(device, *layers, tail="swa=600,full@l1=200,full@l2=100", n_seq=3, rollback=5)
    lines = {(line.group, line.layers): line for line in made.log}
    assert list(lines) == [
        ("swa@l0", (0, 3)), ("full@l1", (1, 4)), ("full@l2", (2,)), ("full@l2", (5,)),
    ]  # fmt: skip
    window = lines["swa@l0", (0, 3)]
    assert (window.raw, window.requested, window.effective, window.window) == (600, 600, 512, 512)
    assert (window.representation, window.body) == ("native_exact", "none")
    assert (window.k, window.v, window.exact_type) == ("bf16", "bf16", "bf16")
    assert (window.history_rows, window.rollback_rows, window.body_rows) == (3 * 512, 3 * 5, 0)
    records = lines["full@l1", (1, 4)]
    assert (records.raw, records.requested, records.effective) == (200, 256, 256)
    assert (records.representation, records.body, records.exact_type) == (
        "overlay", "records", "f16",
    )  # fmt: skip
    assert (records.k, records.v, records.body_rows) == ("kvarn3", "kvarn5", 2048)
    assert (records.history_rows, records.rollback_rows) == (3 * 256, 3 * 5)
    for line in made.log:
        assert (line.device, line.route, line.current) == ("cpu:0", "native", True)
        assert "cpu/commit_tail" in line.entries
        assert "cpu/attend_decode" in line.entries
        memory = made.layer_memory(line.layers[0])
        assert line.resident_bytes == memory.kv_resident_bytes
        assert line.tail_bytes == (memory.kv_exact_history_bytes + memory.kv_rollback_reserve_bytes)
        assert line.transient_bytes == made.memory.kv_transient_bytes
        data = json.loads(json.dumps(line.to_json()))
        assert data["group"] == line.group
        assert data["layers"] == list(line.layers)
    total = sum(line.resident_bytes * len(line.layers) for line in made.log)
    assert total == made.memory.kv_resident_bytes
    assert any("600 rows asked for, 512 kept" in note for note in window.notes)


def test_T13_the_log_as_text_mentions_every_group(device: Device) -> None:
    layers = (swa(), spec(), standard(), swa(), spec(window=300), standard(v="q8_0"))
    made = plan(device, *layers, tail="swa@l0=600,full@l1=200,full@l2=100,swa@l4=0")
    text = made.summary()
    for tail in made.tails:
        assert f"\n  {tail.group.id} layers " in text
        for note in tail.notes:
            assert note.text in text
    assert "swa@l0 layers 0, 3: bf16/bf16 h4/2 d64 sliding window 512; native exact" in text
    assert "native exact 512 rows of 600 asked for bf16" in text
    assert "full@l1 layers 1: kvarn3/kvarn5 published, sinks 0 h4/2 d64 full; overlay 256" in text
    assert "swa@l4 layers 4" in text
    assert "stage 128 rows f16" in text
    assert f"resident {made.memory.kv_resident_bytes / 2**20:.1f} MiB" in text


def test_a_plan_allocates_nothing_and_a_refused_one_neither(device: Device) -> None:
    stand_in = StandIn(device)
    made = plan(stand_in, *MODEL, tail="auto")
    made.summary()
    assert made.log
    assert (stand_in.allocated, stand_in.launches) == (0, 0)
    with pytest.raises(errors.UnsupportedOp, match="head_dim_k"):
        plan(stand_in, *MODEL, spec(head_dim=80), tail="swa=512,full@l1=64,full@l4=0")
    # Nor does a tail on the layer itself hide why the layer is refused (F02).
    with pytest.raises(errors.UnsupportedOp, match="head_dim_k"):
        plan(stand_in, *MODEL, spec(head_dim=80), tail="auto")
    with pytest.raises(RequestError):
        plan(stand_in, *MODEL, tail="1,2,3")
    assert (stand_in.allocated, stand_in.launches) == (0, 0)
    made.allocate()
    assert (stand_in.allocated, stand_in.launches) == (len(MODEL), 0)


def test_a_resolved_tail_is_data(device: Device) -> None:
    tail: ResolvedTail = plan(device, swa(), tail="600").tails[0]
    data = json.loads(json.dumps(tail.to_json()))
    assert (data["group"], data["representation"]) == ("swa@l0", "native_exact")
    assert (data["raw"], data["effective"], data["rollback"]) == (600, 512, 1)
    assert "tail of swa@l0: 600 rows asked for, 512 exact (native exact, bf16" in tail.explain()


# --- field cases

LADDER = """
import sys
import numpy as np
import kvkernels as kvk
from kvkernels.registry import open_device

device, source = open_device("cpu:0"), np.random.default_rng(3)
for dim in (128, 256, 512):
    for n_kv in (256, 512):
        for tail in (0, 128, 256):
            layer = kvk.LayerSpec(n_head=2, n_kv_head=1, head_dim=dim, k="kvarn5", v="kvarn4",
                                  tail=tail, encoder="published")
            plan = kvk.plan([layer], device, kvk.Limits(n_ctx=n_kv, n_ubatch=n_kv))
            cache = plan.allocate()
            for n in (n_kv - 3, 3):
                arrays = [source.normal(size=(n, h, dim)).astype(np.float32) for h in (2, 1, 1)]
                with cache.step({0: n}) as step:
                    out = step.attend(0, *arrays)
                if not np.isfinite(out).all() or not out.any():
                    sys.exit(f"{dim} {n_kv} {tail}: {out}")
            print(dim, n_kv, tail, plan.log[0].route, plan.log[0].effective)
"""


def test_F03_the_ladder_ends_without_an_abort() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LADDER], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 3 * 2 * 3
    assert {line[3] for line in lines} == {"native"}
    for _, n_kv, tail, _, kept in lines:
        assert int(kept) == min(max(128, int(tail)), int(n_kv))


@pytest.mark.parametrize("dim", [128, 256, 512])
@pytest.mark.parametrize("n_ctx", [256, 512, 1024, 2048, 4096, 8192])
def test_F03_every_rung_has_a_route(device: Device, dim: int, n_ctx: int) -> None:
    for tail in ("0", "128", "256"):
        made = plan(device, spec(head_dim=dim), tail=tail, n_ctx=n_ctx, n_ubatch=min(512, n_ctx))
        assert {line.route for line in made.log} == {"native"}


def test_F12_every_pair_of_types_is_served_on_the_device_that_was_asked_for(
    device: Device,
) -> None:
    layers = [spec(k=k, v=v) for k in STANDARD_TYPES for v in STANDARD_TYPES]
    layers += [spec(k=f"kvarn{k}", v=f"kvarn{v}") for k in BITS for v in BITS]
    for tail in (None, "256"):
        made = plan(device, *layers, tail=tail)
        for planned in made.layers:
            assert {d.op.device for d in planned.decisions} == {"cpu:0"}
            assert {str(d.route) for d in planned.decisions} == {"native"}
        assert all(t.warnings == () for t in made.tails)
    with pytest.raises(RequestError, match=r"k, v: found k='kvarn4' with v='q4_0'; needed both"):
        spec(k="kvarn4", v="q4_0")


def test_F12_a_pair_the_device_lacks_is_refused_by_name(device: Device) -> None:
    lacking = one_of("v_type", ("q8_0",))
    table = tuple(
        replace(row, requires=(*row.requires, lacking)) if row.kind is OpKind.ATTEND else row
        for row in device.table
    )
    stand_in = StandIn(device, table)
    with pytest.raises(errors.UnsupportedOp) as caught:
        plan(stand_in, standard(v="q8_0"), standard(), standard())
    assert caught.value.labels == ("layers 1-2",)
    text = str(caught.value)
    assert "[op.v_type] needs v_type in q8_0; found q4_0" in text
    assert "cpu:0" in text
    # With a tail too: the tail is not what is missing.
    with pytest.raises(errors.UnsupportedOp, match=r"\[op.v_type\] needs v_type in q8_0"):
        plan(stand_in, standard(), tail="64")
    # Where only the tail's route is missing the request says so, with device and types.
    lacking = equal("tail_rows", 0)
    table = tuple(
        replace(row, requires=(*row.requires, lacking)) if row.kind is OpKind.ATTEND else row
        for row in device.table
    )
    stand_in = StandIn(device, table)
    with pytest.raises(RequestError, match=r"no native attached-tail.*cpu:0, q8_0/q4_0"):
        plan(stand_in, standard(), tail="64")
    assert stand_in.allocated == 0


@pytest.mark.parametrize("tail", [None, "64", "512"])
def test_F02_what_was_planned_native_is_confirmed_in_the_step(device: Device, tail: Any) -> None:
    """Every size of step, at every fill, takes the planned route: no second opinion refuses it."""
    layers = (spec(), standard(), swa(), swa(300, window_kind="chunked"))
    made = plan(device, *layers, tail=tail, n_ctx=400, n_ubatch=130, n_seq=2)
    cache = made.allocate()
    zeros = np.zeros((130, 4, 64), np.float32)
    for n_tokens in ({0: 1}, {0: 16, 1: 1}, {0: 17}, {0: 113, 1: 17}, {1: 130}, {0: 1, 1: 1}):
        n = sum(n_tokens.values())
        with cache.step(n_tokens) as step:
            for layer in range(len(layers)):
                step.attend(layer, zeros[:n], zeros[:n, :2], zeros[:n, :2])
    assert len(cache._decisions) > 4
    for op, decision in cache._decisions.items():
        assert str(decision.route) == "native", op


def test_F02_a_device_that_changes_its_mind_is_caught_before_anything_runs(device: Device) -> None:
    stand_in = StandIn(device)
    cache = plan(stand_in, standard(), tail="64", n_ctx=400, n_ubatch=130).allocate()
    zeros = np.zeros((20, 4, 64), np.float32)
    stand_in.table = without_bf16(device.table, OpKind.ATTEND)
    with (
        pytest.raises(errors.RouteMismatch, match=r"(?s)planned native by .*op\.tail_dtype"),
        cache.step({0: 20}) as step,
    ):
        step.attend(0, zeros, zeros[:, :2], zeros[:, :2])
    assert stand_in.launches == 0
    assert cache.length(0) == 0


def test_an_exact_layer_has_no_say_in_the_tail_of_its_group(device: Device) -> None:
    made = plan(device, standard(tail=256), standard(k="f16", v="f16"))
    assert [layer.storage.tail_rows for layer in made.layers] == [256, 0]
    with pytest.raises(RequestError, match="0, 256 rows in layers of full@l0"):
        plan(device, standard(tail=256), standard(v="f16"))
