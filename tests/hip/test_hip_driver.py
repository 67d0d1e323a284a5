"""The HIP backend end to end, on a C library whose card is the emulator."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_hip import COMPILER, libraries, library, load
from host_build import CASES

from kvkernels.errors import BackendUnavailable, CompileError, DeviceLost, InputError
from kvkernels.hip.arrays import HipArray
from kvkernels.hip.backend import HipBackend
from kvkernels.op import LayerSpec
from kvkernels.simt.attend import rotate_program
from kvkernels.testing.cases import by_id
from kvkernels.testing.parity import run_case

ROTATE = rotate_program(LayerSpec(n_head=2, n_kv_head=1, head_dim=64), 0)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAKEHIP_COMPILER", COMPILER)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def opened() -> Any:
    return HipBackend(libraries()).open("hip:0")


def rotate(device: Any, rows: int = 3) -> HipArray:
    q = device.upload(np.ones((rows, 64), np.float32))
    out: HipArray = device.empty(q.shape)
    device.driver.launch(ROTATE, "rotate_queries", (rows,), (q, out, np.float32(1)))
    device.synchronize()
    return out


@pytest.mark.parametrize("arch", ["gfx1030", "gfx90a:sramecc+:xnack-"])
@pytest.mark.parametrize("case_id", CASES)
def test_parity_through_the_backend(
    case_id: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKEHIP_ARCH", arch)
    device = opened()
    assert device.caps.facts["lanes"] == (64 if arch.startswith("gfx9") else 32)
    before = load(library()).fakehip_launches()
    result = run_case(device, by_id(case_id))
    assert result.passed, result
    assert str(result.entry).startswith("hip/")
    assert load(library()).fakehip_launches() > before


def test_a_second_process_compiles_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = rotate(opened()).get()
    assert len(list((tmp_path / "kept").glob("*.o"))) == 1
    monkeypatch.setenv("FAKEHIP_COMPILER", "false")
    np.testing.assert_array_equal(rotate(opened()).get(), first)
    monkeypatch.setenv("FAKEHIP_ARCH", "gfx90a")  # another card has code of its own
    with pytest.raises(CompileError):
        rotate(opened())


def test_memory_is_given_back() -> None:
    device = opened()
    live = load(library()).fakehip_live
    gc.collect()
    before = live()
    large = [device.driver.zeros(3 << 20) for _ in range(4)]
    assert live() == before + 4
    assert not large[0].get().any()
    del large
    gc.collect()
    assert live() == before
    small = device.driver.empty((10,), np.float32)
    ptr = small.ptr
    del small
    gc.collect()
    assert device.driver.empty((12,), np.float32).ptr == ptr  # a small one is used again
    device.driver._pool.clear()


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened()
    monkeypatch.setenv("FAKEHIP_MEMORY", str(64 << 20))
    with pytest.raises(MemoryError, match=r"hip:0: an array .*104857600 bytes .*of 0.06 GiB"):
        device.driver.zeros(100 << 20)


@pytest.mark.parametrize(
    ("failure", "error", "words"),
    [
        ("launch", DeviceLost, "kernel rotate_queries: hipModuleLaunchKernel: unspecified launch"),
        ("async", DeviceLost, r"hipDeviceSynchronize: unspecified launch failure \(719\)"),
        ("compile", CompileError, r"kvk.hip:7: error: no such thing"),
        ("image", BackendUnavailable, "does not load code for gfx1030: no kernel image"),
    ],
)
def test_failures_are_ours(
    failure: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = opened()
    monkeypatch.setenv("FAKEHIP_FAIL", failure)
    with pytest.raises(error, match=words):
        rotate(device)
    monkeypatch.setenv("FAKEHIP_FAIL", "")
    if failure == "async":
        load(library()).fakehip_recover()


def test_a_compiler_that_does_not_know_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened()
    monkeypatch.setenv("FAKEHIP_ARCH", "gfx1201")
    with pytest.raises(CompileError, match=r"gfx1030[^\n]*\nerror: another --offload-arch"):
        rotate(device)


def test_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKEHIP_FAIL", "nodevice")
    with pytest.raises(BackendUnavailable, match="the HIP runtime sees no card"):
        opened()


def interface(array: HipArray, **changes: Any) -> SimpleNamespace:
    face = array.__cuda_array_interface__ | changes
    return SimpleNamespace(__cuda_array_interface__=face, dtype=array.dtype)


def tensor(array: HipArray, kind: str, device: str = "cuda", dense: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        data_ptr=lambda: array.ptr, dtype=kind, device=SimpleNamespace(type=device),
        shape=array.shape, is_contiguous=lambda: dense,
    )  # fmt: skip


def test_arrays_of_other_libraries_are_taken_as_they_are() -> None:
    device = opened()
    own = device.upload(np.ones((2, 64), np.float16))
    assert device.rows("q", own).array is own
    seen = device.rows("q", interface(own, stream=7))
    assert (seen.dtype, seen.array.ptr, seen.array.shape) == ("f16", own.ptr, (2, 64))
    bf16 = device.upload(np.ones((2, 64), ml_dtypes.bfloat16))
    for given in (interface(bf16, typestr="<V2"), tensor(bf16, "torch.bfloat16")):
        seen = device.rows("q", given)
        assert (seen.dtype, seen.array.ptr) == ("bf16", bf16.ptr)
        assert device.driver.see("q", seen.array).dtype == "bfloat16"


def test_what_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened()
    own = device.upload(np.ones((2, 64), np.float32))
    for array, found in (
        (np.ones(3, np.float32), "found numpy.ndarray;"),
        ([1.0], "found list;"),
        (interface(own, strides=(512, 8)), "a strided array of shape (2, 64)"),
        (interface(own, data=(4096, False)), "memory of no card"),
        (interface(own, typestr="<f8"), "dtype float64"),
        (tensor(own, "torch.float32", device="cpu"), "a tensor on"),
        (tensor(own, "torch.float32", dense=False), "a strided array"),
    ):
        with pytest.raises(InputError) as caught:
            device.rows("v of layer 0", array)
        assert found in str(caught.value)
    monkeypatch.setenv("FAKEHIP_CARD_OF_POINTERS", "3")
    with pytest.raises(InputError, match="an array on hip:3; needed an array on hip:0"):
        device.rows("v", interface(own))


def test_copies_are_checked_for_bounds_and_direction() -> None:
    device = opened()
    small = device.driver.empty((512,), np.uint8)
    beyond = HipArray(device.driver, small.ptr, (513,), np.uint8)
    with pytest.raises(DeviceLost, match="an upload: hipMemcpy"):
        device.driver.fill(beyond, np.zeros(513, np.uint8))
    with pytest.raises(DeviceLost, match="a download: hipMemcpy"):
        beyond.get()


_NO_CARD = """
from kvkernels.hip.backend import HipBackend
status = HipBackend().probe()
print(status.state, "|", status.detail, "|", status.hint)
"""


def test_the_library_of_this_machine_without_a_card() -> None:
    try:
        ctypes.CDLL("libamdhip64.so.5")
    except OSError:
        pytest.skip("no HIP runtime here: apt-get install --no-install-recommends hipcc")
    done = subprocess.run(
        [sys.executable, "-c", _NO_CARD], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    if "ok" not in done.stdout:
        assert done.stdout.startswith(
            "unavailable | the HIP runtime sees no card | Check `rocminfo`"
        )
