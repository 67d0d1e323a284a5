"""Every entry against the float64 model, and the harness against seeded faults (F19)."""

from __future__ import annotations

import ctypes
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvkernels.calls import AttendCall
from kvkernels.capabilities import Capability
from kvkernels.cli import main
from kvkernels.cpu.table import TABLE
from kvkernels.op import KVARN_BITS, STANDARD_TYPES, TAIL_DTYPES, OpKind
from kvkernels.records.layout import BITS, HEAD_DIMS
from kvkernels.testing import parity
from kvkernels.testing.cases import Case, by_id, cases, select

QUICK = select(quick=True)
SLOW = [case for case in cases() if not case.quick]
ATTEND = {row.entry for row in TABLE if row.kind is OpKind.ATTEND}


def check(device: Any, case: Case) -> list[parity.Result]:
    results = parity.run_all(device, case)
    assert [r.to_json() for r in results if not r.passed] == []
    return results


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.id)
def test_quick(device: Any, case: Case) -> None:
    check(device, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: case.id)
def test_full(device: Any, case: Case) -> None:
    check(device, case)


def test_every_entry_is_run_and_only_where_it_claims_to_serve(device: Any) -> None:
    small = check(device, by_id("gqa/k4v4/d64/h10x2/kv300/q3"))
    assert {r.entry for r in small} == ATTEND
    large = check(device, by_id("gqa/k4v4/d64/h10x2/kv300/q17"))
    assert {r.entry for r in large} == ATTEND - {"cpu/attend_decode"}
    assert small[0].entry == "cpu/attend_decode"
    assert large[0].entry == "cpu/attend_prefill"


def test_the_list_covers_what_the_table_claims() -> None:
    served = [case for case in cases() if case.must_be != "refuse"]
    for dim in HEAD_DIMS:
        assert any(case.layer.head_dim == dim for case in served)
    for subset in (served, [case for case in served if case.quick]):
        layers = [case.layer for case in subset]
        pairs = {(s.k_bits, s.v_bits) for s in layers if s.is_kvarn}
        assert pairs == {(k, v) for k in BITS for v in BITS}
        standard = [(s.k, s.v) for s in layers if not s.is_kvarn]
        assert {k for k, _ in standard} == {v for _, v in standard} == set(STANDARD_TYPES)
    layers = [case.layer for case in served]
    pairs = {(s.k, s.v) for s in layers if not s.is_kvarn}
    assert pairs == {(k, v) for k in STANDARD_TYPES for v in STANDARD_TYPES}
    for dtype in TAIL_DTYPES:
        tails = {(s.k, s.v) for s in layers if s.tail and s.tail_dtype == dtype}
        assert tails >= {(k, v) for k in KVARN_BITS for v in KVARN_BITS}
    assert {case.layer.gqa for case in served if case.layer.n_kv_head >= 2} >= {1, 4, 5, 6, 8, 12}
    for case in served:
        assert case.bytes > 0
        assert case.flops > 0


def test_sizes_of_a_case_by_hand() -> None:
    case = by_id("decode/k4v4/d128/h8x4/kv4096/q1")
    row = 4 * 128 * 2  # K and V values of one row
    # 4095 rows seen before: 31 sealed groups, 127 exact rows in fp16.
    body = 31 * 4 * 2 * (2048 * 4 + 768)
    assert case.bytes == body + 127 * row * 2 + 4 * (row + 2 * 8 * 128)
    assert case.flops == 4 * 4096 * 8 * 128


# --- seeded faults


class Faulty:
    """A device whose attention is spoilt after it ran."""

    def __init__(self, device: Any, spoil: Callable[[Any, AttendCall], None]) -> None:
        self._device, self._spoil = device, spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def run(self, entry: str, op: Any, call: Any) -> None:
        left = [buffer.copy() for buffer in self.scratch._buffers.values()]
        self._device.run(entry, op, call)
        if isinstance(call, AttendCall):
            self.left = left
            self._spoil(self, call)


def a_little_wrong(_: Any, call: AttendCall) -> None:
    call.out[...] *= np.float32(1 + 3e-5)


def heads_swapped(_: Any, call: AttendCall) -> None:
    call.out[:] = call.out[:, ::-1].copy()


def reads_unused_rows(_: Any, call: AttendCall) -> None:
    call.out[...] += 0 * call.buffers.v_exact.view(np.float16).astype(np.float32).sum()


def reads_unused_slots(_: Any, call: AttendCall) -> None:
    axes = call.buffers.k_records.view(np.float16)[-16:].astype(np.float32)
    call.out[...] += 0 * axes.sum()


def reads_before_the_array(_: Any, call: AttendCall) -> None:
    call.out[...] += 0 * ctypes.c_float.from_address(call.q.ctypes.data - 4).value


def writes_behind_the_array(_: Any, call: AttendCall) -> None:
    ctypes.c_float.from_address(call.out.ctypes.data + call.out.nbytes).value = 1.0


def depends_on_the_run(device: Any, call: AttendCall) -> None:
    device.count = getattr(device, "count", 0) + 1
    call.out[...] *= np.float32(1 + 2e-7 * (device.count % 7))


def reads_an_old_workspace(device: Any, call: AttendCall) -> None:
    call.out[...] += 0 * float(device.left[0][:4].view(np.float32)[0])


def almost_zero(_: Any, call: AttendCall) -> None:
    call.out[~call.out.any(axis=-1)] = np.float32(1e-30)


def raises(_: Any, call: AttendCall) -> None:
    raise ZeroDivisionError("not ours")


FAULTS = (
    a_little_wrong, heads_swapped, reads_unused_rows, reads_unused_slots, reads_before_the_array,
    writes_behind_the_array, depends_on_the_run, reads_an_old_workspace, almost_zero, raises,
)  # fmt: skip


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda fault: fault.__name__)
def test_the_harness_sees(device: Any, spoil: Any) -> None:
    case = by_id("masked/k4v4/d64/h4x2/kv420/q32/hidden-rows")
    assert parity.run_case(device, case, activations="f32").passed
    result = parity.run_case(Faulty(device, spoil), case, activations="f32")
    assert not result.passed
    assert result.outcome == ("error" if spoil is raises else "wrong")
    assert result.reasons


class Claims:
    """The same device with another table."""

    def __init__(self, device: Any, table: tuple[Capability, ...]) -> None:
        self._device, self.table = device, table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def test_a_missing_row_is_a_failure_and_not_a_skip(device: Any) -> None:
    case = by_id("gqa/k4v4/d64/h10x2/kv300/q17")
    only_decode = tuple(row for row in TABLE if row.entry in ("cpu/attend_decode", "cpu/commit"))
    result = parity.run_case(Claims(device, only_decode), case)
    assert (result.outcome, result.passed) == ("refused", False)
    assert "op.n_q" in result.reasons


def test_materialised_where_native_is_needed_is_a_failure(device: Any) -> None:
    case = by_id("gqa/k4v4/d64/h10x2/kv300/q17")
    table = tuple(r for r in TABLE if r.entry not in ("cpu/attend_decode", "cpu/attend_prefill"))
    result = parity.run_case(Claims(device, table), case)
    assert (result.outcome, result.passed) == ("wrong", False)
    assert result.reasons == ("must be native, is materialize",)


def test_a_claim_too_many_is_a_failure(device: Any) -> None:
    case = by_id("refuse/k4v4/d80/h4x2/kv300/q1")
    anything = tuple(dataclasses.replace(row, requires=()) for row in TABLE)
    result = parity.run_case(Claims(device, anything), case)
    assert (result.outcome, result.passed) == ("wrong", False)


def test_the_wrong_reason_is_a_failure(device: Any) -> None:
    case = dataclasses.replace(by_id("refuse/k4v4/d80/h4x2/kv300/q1"), reasons=("op.n_q",))
    result = parity.run_case(device, case)
    assert (result.outcome, result.passed) == ("refused", False)


# --- the command


def test_command_json(device: Any) -> None:
    run = CliRunner().invoke(main, ["parity", "--filter", "gqa/*/h6x2/*/q3", "--json"])
    assert run.exit_code == 0, run.output
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert {line["entry"] for line in lines} == ATTEND
    for line in lines:
        assert line["schema"] == "kvk.parity/1"
        assert line["outcome"] == "ok"
        assert line["device"] == "cpu:0"
        assert line["route"] in ("native", "materialize")
        assert 0 < line["error"]["rms"] < line["error"]["limit_rms"]
        assert line["reasons"] == []


def test_command_for_people() -> None:
    run = CliRunner().invoke(main, ["parity", "--filter", "refuse/*d80*"])
    assert run.exit_code == 0, run.output
    assert "(refused)" in run.stdout
    assert "1 cases, 1 runs, 0 failed" in run.stdout


def test_command_fails_when_a_case_fails(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    monkeypatch.setattr(
        "kvkernels.cli.parity.open_device", lambda _: Faulty(device, a_little_wrong)
    )
    run = CliRunner().invoke(main, ["parity", "--filter", "gqa/*/h6x2/*/q3"])
    assert run.exit_code == 1
    assert "outside the limits" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--filter", "nothing-*"], 1, "nothing ran"),
        (["--device", "cpu:7"], 3, "no device 'cpu:7'"),
        (["--fast"], 2, "No such option"),
    ],
)
def test_command_statuses(arguments: list[str], status: int, text: str) -> None:
    run = CliRunner().invoke(main, ["parity", *arguments])
    assert run.exit_code == status, run.output
    assert text in run.stderr
