"""Stand-ins for cupy, the HIP libraries and pyopencl, by which a probe sees any machine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

# ------------------------------------------------------------------ CuPy


class CudaError(RuntimeError):
    """As CuPy's CUDARuntimeError: a number in ``status``."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}: what the runtime says")
        self.status = status


def card(capability: int = 90, name: bytes = b"NVIDIA H200", **changes: Any) -> dict[str, Any]:
    """As cupy.cuda.runtime.getDeviceProperties gives it."""
    return {
        "name": name,
        "major": capability // 10,
        "minor": capability % 10,
        "warpSize": 32,
        "multiProcessorCount": 132,
        "maxThreadsPerBlock": 1024,
        "sharedMemPerBlock": 49152,
        "sharedMemPerBlockOptin": 232448,
        "totalGlobalMem": 149250113536,
    } | changes


def cupy(
    *cards: dict[str, Any],
    runtime: int = 13020,
    driver: int = 13000,
    nvrtc: tuple[int, int] | Exception = (13, 2),
    count: int | Exception | None = None,
    is_hip: bool = False,
) -> Callable[[], Any]:
    """A loader of a CuPy that sees ``cards``; an exception is what that call raises."""

    def given(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    module = SimpleNamespace(
        is_hip=is_hip,
        runtimeGetVersion=lambda: runtime,
        driverGetVersion=lambda: driver,
        getDeviceCount=lambda: given(len(cards) if count is None else count),
        getDeviceProperties=lambda index: cards[index],
    )
    compiler = SimpleNamespace(getVersion=lambda: given(nvrtc))
    return lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=module, nvrtc=compiler))


def raising(error: BaseException) -> Callable[..., Any]:
    """A loader that raises."""

    def load(*_: Any) -> Any:
        raise error

    return load


# ------------------------------------------------------------------ HIP

# Offset of gcnArchName in hipDeviceProp_t: HIP 5 and the old symbol of 6 and 7, and R0600.
R0000, R0600 = 396, 1160
ATTRIBUTES = {63: 104, 56: 1024, 74: 65536, 87: 64}
_NAMES = {100: b"hipErrorNoDevice", 3: b"hipErrorNotInitialized"}


class ErrorName:
    """A foreign function: it takes a restype and is called."""

    restype: Any = None

    def __call__(self, code: int) -> bytes | None:
        return _NAMES.get(code)


class Hip:
    """libamdhip64 as ctypes shows it, with ``archs``, one text per card.

    ``new``: it has hipGetDevicePropertiesR0600 too. ``without``: names it does not export.
    """

    def __init__(
        self,
        *archs: str,
        name: bytes = b"AMD Instinct",
        version: int = 60342134,
        new: bool = True,
        status: int = 0,
        attributes: dict[int, int] | None = None,
        compiler: bool = True,
        without: Sequence[str] = (),
    ) -> None:
        self.archs, self.name, self.status = archs, name, status
        self.version = version
        self.attributes = ATTRIBUTES | (attributes or {})
        self.hipGetErrorName = ErrorName()
        self.asked: list[str] = []
        gone = set(without) | (set() if new else {"hipGetDevicePropertiesR0600"})
        gone |= set() if compiler else {"hiprtcCompileProgram"}
        for attr in gone:
            setattr(self, attr, None)

    def hipGetDeviceCount(self, count: Any) -> int:
        count._obj.value = len(self.archs)
        return self.status

    def hipDeviceGetAttribute(self, value: Any, number: int, index: int) -> int:
        if self.attributes[number] < 0:
            return 1
        value._obj.value = self.attributes[number]
        return 0

    def hipDeviceGetName(self, buffer: Any, size: int, index: int) -> int:
        buffer.value = self.name[: size - 1]
        return 0

    def hipDeviceTotalMem(self, value: Any, index: int) -> int:
        value._obj.value = 64 << 30
        return 0

    def hipRuntimeGetVersion(self, value: Any) -> int:
        value._obj.value = self.version
        return 0

    hipDriverGetVersion = hipRuntimeGetVersion

    def _properties(self, buffer: Any, index: int, offset: int) -> int:
        ctypes.memset(buffer, 0, len(buffer))
        ctypes.memmove(buffer, self.name, len(self.name))
        arch = self.archs[index].encode()
        ctypes.memmove(ctypes.byref(buffer, offset), arch, len(arch))
        return 0

    def hipGetDeviceProperties(self, buffer: Any, index: int) -> int:
        self.asked.append("old")
        return self._properties(buffer, index, R0000)

    def hipGetDevicePropertiesR0600(self, buffer: Any, index: int) -> int:
        self.asked.append("new")
        return self._properties(buffer, index, R0600)

    def hiprtcCompileProgram(self) -> int:
        raise AssertionError("a probe compiles nothing")

    def hiprtcVersion(self, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 9, 0  # as every release of it says
        return 0


def loader(**libraries: Any) -> Callable[[str], Any]:
    """As ctypes.CDLL: ``libraries`` by the stem of their file; others are not there."""

    def load(name: str) -> Any:
        stem = name.partition(".")[0]
        if stem not in libraries:
            text = f"{name}: cannot open shared object file: No such file or directory"
            raise OSError(text)
        if isinstance(libraries[stem], Exception):
            raise libraries[stem]
        return libraries[stem]

    return load


# ------------------------------------------------------------------ pyopencl


class ClError(Exception):
    """As pyopencl's errors: a number in ``code``."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


NOT_FOUND = ClError(-1, "clGetDeviceIDs failed: DEVICE_NOT_FOUND")
NO_PLATFORM = ClError(-1001, "clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR")


class ClDevice:
    """A device whose unknown attributes raise, as drivers' do."""

    def __init__(self, **changes: Any) -> None:
        given = {
            "name": " A GPU\n",
            "type": 4,
            "extensions": "cl_khr_fp64 cl_khr_fp16 cl_khr_int64_base_atomics",
            "version": "OpenCL 3.0 ",
            "opencl_c_version": "OpenCL C 1.2 ",
            "driver_version": "1.2.3",
            "compiler_available": 1,
            "address_bits": 64,
            "max_compute_units": 32,
            "max_work_group_size": 256,
            "local_mem_size": 32768,
            "max_mem_alloc_size": 1 << 30,
            "global_mem_size": 4 << 30,
        }
        self.given = given | changes

    def __getattr__(self, name: str) -> Any:
        if name not in self.given:
            raise ClError(-30, "clGetDeviceInfo failed: INVALID_VALUE")
        return self.given[name]


class Platform:
    """A platform with ``devices``, or the error that listing them raises."""

    def __init__(self, *devices: Any, name: str = "A platform") -> None:
        self.devices, self.name, self.version = list(devices), name, "OpenCL 3.0"

    def get_devices(self) -> list[Any]:
        if self.devices and isinstance(self.devices[0], Exception):
            raise self.devices[0]
        return self.devices


def pyopencl(*platforms: Any) -> Callable[[], Any]:
    """A loader of a pyopencl that lists ``platforms``, or raises the error given instead."""

    def get_platforms() -> list[Any]:
        if platforms and isinstance(platforms[0], Exception):
            raise platforms[0]
        return list(platforms)

    return lambda: SimpleNamespace(Error=ClError, get_platforms=get_platforms)
