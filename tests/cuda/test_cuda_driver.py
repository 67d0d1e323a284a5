"""The CUDA driver end to end, on a CuPy whose card is the emulator."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import Array, Card, Foreign
from host_build import CASES

from kvkernels.capabilities import DeviceCaps
from kvkernels.cuda.device import open_cuda
from kvkernels.errors import (
    BackendUnavailable,
    CompileError,
    DeviceLost,
    InputError,
    OutOfDeviceMemory,
)
from kvkernels.op import LayerSpec
from kvkernels.simt.attend import rotate_program
from kvkernels.simt.device import SimtDevice
from kvkernels.testing.cases import by_id
from kvkernels.testing.parity import run_case

DEVICES = Path(__file__).parents[2] / "capabilities" / "devices"
ROTATE = rotate_program(LayerSpec(n_head=2, n_kv_head=1, head_dim=64), 0)


@pytest.fixture
def card() -> Card:
    return Card()


def opened(card: Card, monkeypatch: pytest.MonkeyPatch, name: str = "h200-sm90") -> SimtDevice:
    monkeypatch.setitem(sys.modules, "cupy", card.module())
    text = (DEVICES / f"cuda-{name}.json").read_text(encoding="utf-8")
    return open_cuda(DeviceCaps.from_json(text), 0)


@pytest.fixture
def device(card: Card, monkeypatch: pytest.MonkeyPatch) -> SimtDevice:
    return opened(card, monkeypatch)


def rotate(device: SimtDevice, q: Array, rows: int = 3) -> Array:
    out = device.empty(q.shape)
    device.driver.launch(ROTATE, "rotate_queries", (rows,), (q, out, np.float32(1)))
    return out


@pytest.mark.parametrize("case_id", CASES)
def test_parity_through_the_adapter(card: Card, device: SimtDevice, case_id: str) -> None:
    result = run_case(device, by_id(case_id))
    assert result.passed, result
    assert str(result.entry).startswith("cuda/")
    assert {name for name, _, _ in card.launches} >= {"attend", "merge"}


def test_code_is_kept_between_processes_under_all_that_made_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = []
    for version, name in (
        ((13, 2), "h200-sm90"),
        ((13, 2), "h200-sm90"),
        ((13, 3), "h200-sm90"),
        ((13, 3), "t4-sm75"),
    ):
        card = Card(version)
        device = opened(card, monkeypatch, name)
        rotate(device, device.upload(np.ones((3, 64), np.float32)))
        compiled.append(card.compiled)
    first, again, other_compiler, other_card = compiled
    assert again == []
    assert len(first) == len(other_compiler) == len(other_card) == 1
    assert first[0] == ("--std=c++17", "--fmad=false", "--gpu-architecture=sm_90")
    assert other_card[0][-1] == "--gpu-architecture=sm_75"


def test_launches_go_to_the_callers_stream(card: Card, device: SimtDevice) -> None:
    q = device.upload(np.ones((3, 64), np.float32))
    rotate(device, q)
    with device.driver.cupy.cuda.Stream() as stream:
        rotate(device, q)
        device.synchronize()
    assert [where for *_, where in card.launches] == ["null", "caller's"]
    assert stream.waits == 1


def test_arrays_of_other_libraries_are_taken_as_they_are(device: SimtDevice) -> None:
    host = np.ones((2, 2, 64), np.float16)
    taken = device.rows("q", Foreign(host))
    assert taken.dtype == "f16"
    assert taken.array.data.ptr == host.ctypes.data
    own = device.upload(np.ones((2, 64), np.float32))
    assert device.rows("q", own).array is own
    bf16 = Foreign(np.ones((2, 64), ml_dtypes.bfloat16))
    assert device.rows("q", bf16).dtype == "bf16"


def test_a_bfloat16_tensor_of_torch_is_taken_by_its_bits(
    device: SimtDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tensor(Foreign):
        dtype = "torch.bfloat16"

        def detach(self) -> Tensor:
            return self

        def view(self, kind: str) -> Foreign:
            assert kind == "torch.int16"
            return Foreign(self.host.view(np.int16))

    torch = SimpleNamespace(Tensor=Tensor, bfloat16="torch.bfloat16", int16="torch.int16")
    monkeypatch.setitem(sys.modules, "torch", torch)
    host = np.ones((2, 64), ml_dtypes.bfloat16)
    taken = device.rows("k", Tensor(host))
    assert taken.dtype == "bf16"
    assert taken.array.data.ptr == host.ctypes.data
    # What the kernels' launches look at again.
    assert device.driver.see("k", taken.array).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.ones((2, 64), np.float32), "memory of another kind (DLPack device 1)"),
        ([[1.0]], "found list;"),
        (Foreign(np.ones(3), device=1), "an array on cuda:1"),
        (Array(np.ones(3), device=1), "an array on cuda:1"),
        (Foreign(np.ones(3), memory=1), "DLPack device 1"),
        (Foreign(None), "does not take (BufferError: it requires gradients)"),
        (Array(np.ones((4, 64), np.float32)[:, ::2]), "strides (256, 8) of shape (4, 32)"),
        (Array(np.ones((2, 64), np.float64)), "dtype float64"),
    ],
)
def test_what_cannot_be_used_is_said(device: SimtDevice, array: object, found: str) -> None:
    with pytest.raises(InputError) as caught:
        device.rows("q of layer 3", array)
    assert str(caught.value).startswith("q of layer 3: found ")
    assert found in str(caught.value)


def test_no_room(card: Card, device: SimtDevice) -> None:
    card.room = 1 << 20
    with pytest.raises(OutOfDeviceMemory, match=r"3221225472 bytes .*; 1.00 GiB of 8.00"):
        device.driver.zeros(3 << 30)


def test_failures_are_ours(card: Card, device: SimtDevice) -> None:
    q = device.upload(np.ones((3, 64), np.float32))
    card.fail_launch = 700
    with pytest.raises(DeviceLost, match="kernel rotate_queries: DriverApiError: cudaError700"):
        rotate(device, q)
    card.fail_launch, card.fail_sync = 2, 719
    with pytest.raises(MemoryError, match="kernel rotate_queries"):
        rotate(device, q)
    with pytest.raises(DeviceLost, match="waiting: RuntimeApiError: cudaError719"):
        device.synchronize()


def test_a_compiler_that_fails_says_why(card: Card, device: SimtDevice, tmp_path: Path) -> None:
    card.fail_compile = True
    q = device.upload(np.ones((3, 64), np.float32))
    with pytest.raises(CompileError, match=r"k.cu\(7\): error: no such thing") as caught:
        rotate(device, q)
    assert "rotate_queries did not compile for sm_90 with NVRTC 13.2: " in str(caught.value)
    assert list((tmp_path / "kept").glob("*.o")) == []


def test_a_driver_too_old_for_the_code(card: Card, device: SimtDevice) -> None:
    card.fail_load = 222
    q = device.upload(np.ones((3, 64), np.float32))
    with pytest.raises(BackendUnavailable, match="Update the driver"):
        rotate(device, q)


def test_a_card_that_this_nvrtc_has_no_code_for(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", card.module())
    caps = DeviceCaps(
        id="cuda:0", backend="cuda", name="old", driver="", features={},
        facts={"compute_capability": 61, "target": None},
    )  # fmt: skip
    with pytest.raises(BackendUnavailable, match=r"capability 61.*cuda12"):
        open_cuda(caps, 0)
    card.version = (13, 0)
    module = card.module()
    module.cuda.nvrtc = None
    monkeypatch.setitem(sys.modules, "cupy", module)
    text = (DEVICES / "cuda-h200-sm90.json").read_text(encoding="utf-8")
    with pytest.raises(BackendUnavailable, match="CuPy finds no NVRTC"):
        open_cuda(DeviceCaps.from_json(text), 0)
