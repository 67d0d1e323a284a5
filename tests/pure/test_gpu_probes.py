"""Probes of cuda, hip and opencl: every way to find nothing has its cause and its fix, and what is
found becomes plain facts. No driver is touched: ``fake_drivers`` stand in.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_drivers import (
    NO_PLATFORM,
    NOT_FOUND,
    ClDevice,
    ClError,
    CudaError,
    Hip,
    Platform,
    card,
    cupy,
    loader,
    pyopencl,
    raising,
)

from kvkernels import registry
from kvkernels.backend import Backend, BackendStatus
from kvkernels.capabilities import DeviceCaps, Feature
from kvkernels.cuda.backend import CudaBackend
from kvkernels.cuda.probe import probe_cuda
from kvkernels.errors import BackendUnavailable
from kvkernels.hip.backend import HipBackend
from kvkernels.hip.library import Libraries
from kvkernels.hip.probe import device_arch, probe_hip
from kvkernels.opencl.backend import OpenclBackend
from kvkernels.opencl.probe import list_devices, probe_opencl
from kvkernels.simt.opening import open_listed

ROOT = Path(__file__).parents[2]


def found(status: BackendStatus) -> tuple[DeviceCaps, ...]:
    """The devices, which survive a process boundary."""
    assert status.ok, str(status)
    assert all(DeviceCaps.from_json(caps.to_json()) == caps for caps in status.devices)
    assert all(caps.qualified == {} for caps in status.devices)  # nothing ran there yet
    return status.devices


# ------------------------------------------------------------------ CUDA

NVRTC_MISSING = RuntimeError("DynamicLibNotFoundError: libnvrtc.so")
CUDA_FAILURES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "no CuPy": (
        raising(ModuleNotFoundError("No module named 'cupy'", name="cupy")),
        "CuPy is not installed",
        "pip install 'kvkernels[cuda13]'",
    ),
    "CuPy lacks a part": (
        raising(ModuleNotFoundError("No module named 'fastrlock'", name="fastrlock")),
        "No module named 'fastrlock'",
        "'kvkernels[cuda12]'",
    ),
    "CuPy broken": (
        raising(ImportError("libcublas.so.12:\n cannot open shared object file")),
        "cannot be imported: ImportError: libcublas.so.12: cannot open",
        "one CuPy package only",
    ),
    "CuPy of ROCm": (cupy(card(), is_hip=True), "built for ROCm", "backend 'hip'"),
    "no driver": (
        cupy(driver=0, count=CudaError(35)),
        "no NVIDIA driver was found",
        "Install the NVIDIA driver",
    ),
    "driver too old for CUDA 13": (
        cupy(driver=12040, count=CudaError(35)),
        "the driver is for CUDA 12.4, this CuPy needs CUDA 13.2",
        "replace cupy-cuda13x: pip install 'kvkernels[cuda12]'",
    ),
    "driver too old for CUDA 12": (
        cupy(runtime=12090, driver=11040, count=CudaError(35)),
        "the driver is for CUDA 11.4, this CuPy needs CUDA 12.9",
        "Update the driver",
    ),
    "no card": (cupy(count=CudaError(100)), "sees no card", "CUDA_VISIBLE_DEVICES"),
    "none listed": (cupy(), "sees no card", "CUDA_VISIBLE_DEVICES"),
    "mismatch": (cupy(count=CudaError(803)), "kernel module differ", "Reboot"),
    "another error": (cupy(count=CudaError(999)), "cudaError999", "nvidia-smi"),
    "no NVRTC 13": (
        cupy(card(), nvrtc=NVRTC_MISSING),
        "finds no NVRTC, the compiler of CUDA 13.2",
        "pip install 'kvkernels[cuda13]', which brings it",
    ),
    "no NVRTC 12": (
        cupy(card(), runtime=12090, nvrtc=NVRTC_MISSING),
        "finds no NVRTC, the compiler of CUDA 12.9",
        "pip install 'kvkernels[cuda12]', which brings it",
    ),
}


@pytest.mark.parametrize("case", CUDA_FAILURES)
def test_cuda_says_what_is_missing_and_what_to_do(case: str) -> None:
    load, cause, fix = CUDA_FAILURES[case]
    status = probe_cuda(load)
    assert (status.name, status.state, status.devices) == ("cuda", "unavailable", ())
    assert cause in status.detail
    assert fix in status.hint
    assert "\n" not in str(status)


def test_cuda_old_driver_of_the_same_major_is_not_told_to_change_the_package() -> None:
    hint = probe_cuda(CUDA_FAILURES["driver too old for CUDA 12"][0]).hint
    assert hint == "Update the driver"


def test_cuda_facts() -> None:
    status = probe_cuda(cupy(card(), card(61, b"GeForce GTX 1070"), nvrtc=(12, 4), runtime=12040))
    first, second = found(status)
    assert (first.id, first.name, first.driver) == ("cuda:0", "NVIDIA H200", "CUDA 13.0")
    assert first.facts == {
        "compute_capability": 90,
        "lanes": 32,
        "n_sm": 132,
        "max_threads": 1024,
        "local_memory": 49152,
        "memory": 149250113536,
        "runtime": 12040,
        "driver": 13000,
        "nvrtc": 12040,
        "target": "sm_90",
    }
    assert first.features == {"fp64": Feature(True, True)}
    assert (second.id, second.facts["target"]) == ("cuda:1", "sm_61")
    assert status.detail == status.hint == ""


def test_F20_cuda_says_which_cards_the_installed_cupy_no_longer_compiles_for() -> None:
    status = probe_cuda(cupy(card(61, b"GeForce GTX 1070"), card()))
    old, new = found(status)
    assert "cuda:0 (GeForce GTX 1070)" in status.detail
    assert "cuda:1" not in status.detail
    assert "cupy-cuda12x" in status.hint
    assert (old.facts["target"], new.facts["target"]) == (None, "sm_90")


def test_cuda_a_surprise_is_a_status() -> None:
    status = probe_cuda(cupy({"name": b"half a card"}))
    assert (status.state, status.detail) == ("broken", "the probe failed: KeyError: 'major'")


# ------------------------------------------------------------------ HIP


def libraries(hip: Any, **more: Any) -> Libraries:
    return Libraries(load=loader(libamdhip64=hip, **more))


HIP_FAILURES: dict[str, tuple[Libraries, str, str]] = {
    "no runtime": (Libraries(load=loader()), "no HIP runtime library", "Install ROCm"),
    "runtime cannot be loaded": (
        libraries(OSError("libhsa-runtime64.so.1: undefined symbol: x")),
        "cannot be loaded: libhsa-runtime64.so.1: undefined symbol: x",
        "Install ROCm",
    ),
    "no card": (libraries(Hip(status=100)), "sees no card", "HIP_VISIBLE_DEVICES"),
    "none listed": (libraries(Hip()), "sees no card", "/dev/kfd"),
    "another error": (libraries(Hip(status=3)), "hipErrorNotInitialized (3)", "rocminfo"),
    "an error with no name": (libraries(Hip(status=9)), "HIP error (9)", "rocminfo"),
    "no error names": (
        libraries(Hip(status=9, without=("hipGetErrorName",))),
        "HIP error 9",
        "rocminfo",
    ),
    "no compiler": (
        libraries(Hip("gfx906", compiler=False)),
        "not its compiler (libhiprtc.so)",
        "Install ROCm",
    ),
    "another library of that name": (
        libraries(Hip("gfx906", without=("hipGetDeviceCount",))),
        "HIP error (-1)",
        "rocminfo",
    ),
}


@pytest.mark.parametrize("case", HIP_FAILURES)
def test_hip_says_what_is_missing_and_what_to_do(case: str) -> None:
    given, cause, fix = HIP_FAILURES[case]
    status = probe_hip(given, {})
    assert (status.name, status.state, status.devices) == ("hip", "unavailable", ())
    assert cause in status.detail
    assert fix in status.hint


def test_hip_facts() -> None:
    status = probe_hip(libraries(Hip("gfx90a:sramecc+:xnack-", "gfx908:sramecc+:xnack-")), {})
    first, second = found(status)
    assert (first.id, first.name, first.driver) == ("hip:0", "AMD Instinct", "HIP 6.3")
    assert first.facts == {
        "arch": "gfx90a:sramecc+:xnack-",
        "gfx": "gfx90a",
        "family": "cdna2",
        "lanes": 64,
        "n_sm": 104,
        "max_threads": 1024,
        "local_memory": 65536,
        "memory": 64 << 30,
        "runtime": 6030,
        "driver": 6030,
        "hiprtc": 6030,
    }
    assert first.features == {"fp64": Feature(True, True)}
    assert (second.id, second.facts["family"]) == ("hip:1", "cdna1")


@pytest.mark.parametrize(("new", "asked"), [(True, ["new"]), (False, ["old"])])
def test_hip_finds_the_architecture_in_either_layout(new: bool, asked: list[str]) -> None:
    hip = Hip("gfx1030", name=b"a card that says gfx900 of itself", new=new)
    assert device_arch(hip, 0) == "gfx1030"
    assert hip.asked == asked


@pytest.mark.parametrize("arch", ["", "gfx", "gfx1030 or gfx1100", "xgfx1030", "gfx115x"])
def test_hip_an_architecture_that_cannot_be_read_is_unknown(arch: str) -> None:
    (caps,) = found(probe_hip(libraries(Hip(arch)), {}))
    assert (caps.facts["arch"], caps.facts["gfx"], caps.facts["family"]) == (None, None, None)
    assert caps.features["fp64"].enabled is None


def test_hip_a_card_whose_name_is_an_architecture() -> None:
    assert device_arch(Hip("gfx1030", name=b"gfx900"), 0) == "gfx1030"


def test_hip_two_architectures_in_one_answer_are_unknown() -> None:
    assert device_arch(Hip("gfx1030\0gfx1100"), 0) is None
    assert device_arch(Hip("gfx1030\0gfx1030"), 0) == "gfx1030"
    no_function = ("hipGetDevicePropertiesR0600", "hipGetDeviceProperties")
    assert device_arch(Hip("gfx1030", without=no_function), 0) is None


def test_F23_hip_lanes_that_contradict_the_family_are_unknown() -> None:
    (caps,) = found(probe_hip(libraries(Hip("gfx1100", attributes={87: 64})), {}))
    assert (caps.facts["family"], caps.facts["lanes"]) == ("rdna3", None)
    (caps,) = found(probe_hip(libraries(Hip("gfx1100", attributes={87: 32})), {}))
    assert caps.facts["lanes"] == 32


def test_hip_what_a_runtime_does_not_say_is_unknown() -> None:
    without = ("hipDeviceTotalMem", "hipDriverGetVersion", "hipDeviceGetName")
    hip = Hip("gfx906", without=without, attributes={74: -1}, version=0)
    (caps,) = found(probe_hip(libraries(hip), {}))
    facts = caps.facts
    assert [facts[n] for n in ("memory", "driver", "runtime", "local_memory")] == [None] * 4
    assert (caps.name, caps.driver) == ("gfx906", "HIP")


def test_F21_hip_an_override_is_shown() -> None:
    environ = {"HSA_OVERRIDE_GFX_VERSION": "10.3.0", "HOME": "/"}
    (caps,) = found(probe_hip(libraries(Hip("gfx1030", attributes={87: 32})), environ))
    assert caps.facts["hsa_override_gfx_version"] == "10.3.0"
    assert "home" not in caps.facts


@pytest.mark.parametrize("has_compiler", [True, False])
def test_hip_libraries_are_tried_newest_first_and_the_compiler_is_the_runtimes(
    has_compiler: bool,
) -> None:
    tried: list[str] = []
    runtime = Hip("gfx906", compiler=False)

    def load(name: str) -> Any:
        tried.append(name)
        if name == "libamdhip64.so.6" or (has_compiler and name == "libhiprtc.so.6"):
            return runtime
        # One of another release would load, and must not be used.
        if name.startswith("libhiprtc") and name != "libhiprtc.so.6":
            return Hip()
        raise OSError(f"{name}: cannot open shared object file")

    status = probe_hip(Libraries(load=load), {})
    assert tried == ["libamdhip64.so.7", "libamdhip64.so.6", "libhiprtc.so.6"]
    assert status.ok is has_compiler
    if has_compiler:
        assert found(status)[0].facts["hiprtc"] == 6030


def test_hip_a_compiler_given_by_path_needs_no_version() -> None:
    given = libraries(Hip("gfx906", compiler=False), libhiprtc=Hip())
    assert found(probe_hip(replace(given, compiler=("libhiprtc.so",)), {}))


def test_hip_paths_can_be_given() -> None:
    given = replace(libraries(Hip("gfx906")), runtime=("libamdhip64.fake",), compiler=())
    assert found(HipBackend(given).probe())[0].facts["gfx"] == "gfx906"


# ------------------------------------------------------------------ OpenCL

CL_FAILURES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "no pyopencl": (
        raising(ModuleNotFoundError("No module named 'pyopencl'", name="pyopencl")),
        "pyopencl is not installed",
        "pip install 'kvkernels[opencl]'",
    ),
    "pyopencl lacks a part": (
        raising(ModuleNotFoundError("No module named 'pytools'", name="pytools")),
        "cannot be imported: ModuleNotFoundError: No module named 'pytools'",
        "pip install 'kvkernels[opencl]'",
    ),
    "pyopencl broken": (raising(ImportError("libOpenCL.so.1")), "libOpenCL.so.1", "pip install"),
    "no platform": (pyopencl(NO_PLATFORM), "PLATFORM_NOT_FOUND_KHR", "/etc/OpenCL/vendors"),
    "no platform listed": (pyopencl(), "there is no platform", "clinfo"),
    "another error": (
        pyopencl(ClError(-6, "clGetPlatformIDs failed: OUT_OF_HOST_MEMORY")),
        "OUT_OF_HOST_MEMORY",
        "clinfo",
    ),
    "no device": (
        pyopencl(Platform(NOT_FOUND, name="One"), Platform(name="Two")),
        "no platform lists a device (One: no device; Two: no device)",
        "clinfo",
    ),
    "a driver that fails": (
        pyopencl(Platform(ClError(-30, "clGetDeviceIDs failed: INVALID_VALUE"))),
        "A platform: ClError: clGetDeviceIDs failed: INVALID_VALUE",
        "clinfo",
    ),
}


@pytest.mark.parametrize("case", CL_FAILURES)
def test_opencl_says_what_is_missing_and_what_to_do(case: str) -> None:
    load, cause, fix = CL_FAILURES[case]
    status = probe_opencl(load)
    assert (status.name, status.state, status.devices) == ("opencl", "unavailable", ())
    assert cause in status.detail
    assert fix in status.hint


def test_opencl_facts() -> None:
    (caps,) = found(probe_opencl(pyopencl(Platform(ClDevice()))))
    assert (caps.id, caps.name, caps.driver) == ("opencl:0", "A GPU", "OpenCL 3.0 1.2.3")
    assert caps.facts == {
        "type": "gpu",
        "platform": "A platform",
        "version": 3000,
        "compiler": 1020,
        "address_bits": 64,
        "lanes": None,
        "n_sm": 32,
        "max_threads": 256,
        "local_memory": 32768,
        "max_alloc": 1 << 30,
        "memory": 4 << 30,
    }
    assert set(caps.features.values()) == {Feature(True, True)}
    assert set(caps.features) == {"fp64", "fp16", "int64_atomics"}


@pytest.mark.parametrize(
    ("changes", "fact", "value"),
    [
        ({"type": 2}, "type", "cpu"),
        ({"type": 1}, "type", None),  # CL_DEVICE_TYPE_DEFAULT alone says nothing
        ({"opencl_c_version": "OpenCL C 3.0"}, "compiler", 3000),
        ({"opencl_c_version": "a compiler"}, "compiler", None),
        ({"compiler_available": 0}, "compiler", None),
        ({"version": ""}, "version", None),
        ({"extensions": "cl_nv_device_attribute_query", "warp_size_nv": 32}, "lanes", 32),
        ({"extensions": "cl_amd_device_attribute_query", "wavefront_width_amd": 64}, "lanes", 64),
        ({"warp_size_nv": 32}, "lanes", None),  # no extension says that the answer means anything
        ({"max_mem_alloc_size": "many"}, "max_alloc", None),
        ({"max_mem_alloc_size": True}, "max_alloc", None),
    ],
)
def test_opencl_facts_of_others(changes: dict[str, Any], fact: str, value: object) -> None:
    (caps,) = found(probe_opencl(pyopencl(Platform(ClDevice(**changes)))))
    assert caps.facts[fact] == value


def test_opencl_driver_is_one_short_text() -> None:
    platform = Platform(ClDevice(driver_version="3.1"), ClDevice(driver_version=None))
    platform.version = "OpenCL 3.0 PoCL 3.1  Linux, None+Asserts, LLVM 15.0.6"
    first, second = found(probe_opencl(pyopencl(platform)))
    assert (first.driver, second.driver) == ("OpenCL 3.0 PoCL 3.1 3.1", "OpenCL 3.0 PoCL 3.1")


def test_opencl_features_are_extensions_and_not_parts_of_their_names() -> None:
    (caps,) = found(probe_opencl(pyopencl(Platform(ClDevice(extensions="cl_khr_fp64_x")))))
    assert set(caps.features.values()) == {Feature(False, False)}


def test_opencl_ids_count_over_all_platforms_and_a_failing_one_hides_no_other() -> None:
    load = pyopencl(
        Platform(ClDevice(name="a"), ClDevice(name="b", type=2)),
        Platform(NOT_FOUND),
        Platform(ClError(-30, "INVALID_VALUE")),
        Platform(ClDevice(name="c")),
    )
    devices = found(probe_opencl(load))
    assert [(d.id, d.name) for d in devices] == [
        ("opencl:0", "a"),
        ("opencl:1", "b"),
        ("opencl:2", "c"),
    ]
    assert [device.name for _, device in list_devices(load())] == ["a", "b", "c"]


# ------------------------------------------------------------------ the backends


@pytest.mark.parametrize("backend", [CudaBackend(), HipBackend(), OpenclBackend()])
def test_a_backend_follows_the_protocol(backend: Backend) -> None:
    assert isinstance(backend, Backend)
    assert registry.BUILTIN[backend.name].startswith(f"kvkernels.{backend.name}.backend:")
    assert all(row.entry.startswith(f"{backend.name}/") for row in backend.table)


def test_opening_without_a_driver_module_is_a_plain_reason() -> None:
    caps = DeviceCaps(id="records:0", backend="records", name="a package that opens nothing")
    status = BackendStatus("records", devices=(caps,))
    with pytest.raises(BackendUnavailable, match=r"this build has no kvkernels\.records\.device"):
        open_listed(status, "records:0")
    with pytest.raises(BackendUnavailable, match="no device 'records:1'; found: records:0"):
        open_listed(status, "records:1")
    with pytest.raises(BackendUnavailable, match="gone"):
        open_listed(BackendStatus("records", "unavailable", "gone"), "records:0")


def test_opening_calls_the_driver_with_facts_index_and_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[object, ...]] = []

    class Module:
        @staticmethod
        def open_hip(caps: DeviceCaps, index: int, **options: object) -> str:
            asked.append((caps, index, options))
            return "a device"

    monkeypatch.setitem(sys.modules, "kvkernels.hip.device", Module)
    given = libraries(Hip("gfx906", "gfx906"))
    assert HipBackend(given).open("hip:1") == "a device"
    caps = probe_hip(given).devices[1]
    assert asked == [(caps, 1, {"libraries": given})]


def test_a_driver_module_that_lacks_something_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    (caps,) = found(probe_cuda(cupy(card())))
    monkeypatch.setattr(
        "importlib.import_module", raising(ModuleNotFoundError("No x", name="some_library"))
    )
    with pytest.raises(ModuleNotFoundError, match="No x"):
        open_listed(BackendStatus("cuda", devices=(caps,)), "cuda:0")


def test_V4_an_opencl_device_is_used_only_when_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvkernels.opencl.backend.probe_opencl", lambda: probe_opencl(load))
    load = pyopencl(Platform(ClDevice(type=2)))
    opened = []
    monkeypatch.setattr(OpenclBackend, "open", lambda self, name: opened.append(name))
    for nameless in ("opencl", "opencl:", ""):
        with pytest.raises(BackendUnavailable):
            registry.open_device(nameless)
    assert opened == []
    with pytest.raises(BackendUnavailable):  # None is not a device, but it was asked for
        registry.open_device("opencl:0")
    assert opened == ["opencl:0"]


def test_importing_tables_probes_and_backends_loads_no_driver_package() -> None:
    modules = [
        f"kvkernels.{b}.{m}" for b in ("cuda", "hip", "opencl") for m in ("table", "backend")
    ]
    code = f"import sys, {', '.join(modules)}\n"
    code += "print([m for m in ('cupy', 'pyopencl', 'numba', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() in ("[]", "['numpy']")
