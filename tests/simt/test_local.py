"""What the table asks of local memory is what the kernels have in it (F25)."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from simt_tools import spec

from kvkernels.op import OpKind
from kvkernels.operations import attend_op
from kvkernels.simt import aware, commit_rows, materialize, staging, unfit
from kvkernels.simt.attend import attend_program, merge_program, mma_program, rotate_program
from kvkernels.simt.commit import _SEAL
from kvkernels.simt.emulator.driver import EmulatorDriver
from kvkernels.simt.launch import block_rows
from kvkernels.simt.local import local_bytes
from kvkernels.simt.program import Program
from kvkernels.storage import Storage

HEADS = (64, 128, 256, 512)


def section(driver: EmulatorDriver, program: Program) -> int:
    """Bytes of shared memory of all kernels of a program together, with their padding."""
    first, last = ctypes.c_void_p(), ctypes.c_void_p()
    driver.kernel(program).kvk_shared_range(ctypes.byref(first), ctypes.byref(last))
    return (last.value or 0) - (first.value or 0)


def op(layer: Any, kind: OpKind = OpKind.ATTEND) -> Any:
    return attend_op(layer, "simt:0", 1, 1, kind=kind)


@pytest.mark.parametrize("dim", HEADS)
def test_F25_attention(driver: EmulatorDriver, dim: int) -> None:
    layer = spec(head_dim=dim, n_head=16)
    storage = Storage.plain(layer)
    for entry, prefill, mma in (
        ("attend_portable", False, False),
        ("attend_prefill_portable", True, False),
        ("attend_prefill_mma", True, True),
    ):
        rows = block_rows(layer, 64, prefill=prefill, mma=mma)
        program = (
            mma_program(layer, storage, rows) if mma else attend_program(layer, storage, rows, 0, 0)
        )
        needs = local_bytes(f"simt/{entry}", op(layer))
        assert needs - 300 <= section(driver, program) <= needs + 256, entry
    for small in (rotate_program(layer, 0), merge_program(layer, 8)):
        assert section(driver, small) == dim * 4 <= local_bytes("simt/attend_portable", op(layer))


@pytest.mark.parametrize("dim", HEADS)
def test_F25_encoders(driver: EmulatorDriver, dim: int) -> None:
    layer = spec(head_dim=dim)
    commit, weighed, decode = (
        local_bytes(f"simt/{name}", op(layer, kind))
        for name, kind in (
            ("commit", OpKind.COMMIT),
            ("commit_aware", OpKind.COMMIT),
            ("materialize", OpKind.MATERIALIZE),
        )
    )
    rows = 4096 // dim * (dim + 1) * 4
    assert section(driver, staging.program(dim)) == rows == commit == decode
    assert section(driver, materialize.program(dim)) == rows
    assert section(driver, unfit._overflow(dim)) == rows
    assert section(driver, _SEAL) <= commit
    # Of several kernels: the section is their sum.
    assert section(driver, aware._AXES) <= weighed
    assert section(driver, aware._MOMENTS) - 2 * 16896 == weighed == 25600
    assert section(driver, aware._FEEDBACK) - 6144 <= weighed


def test_F25_rows(driver: EmulatorDriver) -> None:
    layer = spec("q8_0", "q8_0")
    assert section(driver, commit_rows._ROWS) == local_bytes("simt/commit_rows", op(layer))
    assert section(driver, commit_rows._TAIL) == local_bytes("simt/commit_tail", op(layer))
    assert section(driver, unfit._CHECK) == 576
