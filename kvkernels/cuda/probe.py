"""Which CUDA cards this process sees through CuPy, as plain facts; and if none, why not.

Nothing here allocates on a card or compiles for it. Versions are integers: 12040 is 12.4.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from kvkernels.backend import BackendStatus
from kvkernels.capabilities import DeviceCaps, Fact, Feature
from kvkernels.cuda.arch import target
from kvkernels.cuda.table import CUDA_13, TURING
from kvkernels.simt.probing import Stop, dotted, probed, text_of

NAME = "cuda"
_INSTALL = (
    "pip install 'kvkernels[cuda13]' (cards from compute capability 7.5 and a driver for CUDA 13), "
    "else 'kvkernels[cuda12]'"
)
#: cudaError_t -> (what it means, what to do)
_ERRORS = {
    3: ("the driver could not start", "Look at `nvidia-smi` and the kernel log"),
    46: ("all cards are busy or exclusive to other processes", "Free a card"),
    100: (
        "the driver sees no card",
        "Check `nvidia-smi` and that CUDA_VISIBLE_DEVICES does not hide the card",
    ),
    802: ("the system is not ready yet", "Wait for the fabric manager, or restart it"),
    803: ("the driver's library and kernel module differ", "Reboot, or reload the nvidia module"),
    804: (
        "a compatibility library of CUDA is used on a card that does not allow it",
        "Remove the cuda-compat package from the library path",
    ),
}
_NO_DRIVER = 35


def _import_cupy() -> Any:
    return importlib.import_module("cupy")


def probe_cuda(load: Callable[[], Any] = _import_cupy) -> BackendStatus:
    """A status with every card, or with the cause and its fix. Never raises.

    ``load`` returns the module ``cupy``.
    """
    return probed(NAME, lambda: _probe(load))


def _probe(load: Callable[[], Any]) -> BackendStatus:
    cuda = _cupy(load).cuda
    runtime = cuda.runtime
    if runtime.is_hip:
        raise Stop(
            "this CuPy is built for ROCm", "AMD cards are the backend 'hip', which needs no CuPy"
        )
    version = int(runtime.runtimeGetVersion())
    count = _count(runtime, version)
    compiler = _nvrtc(cuda, version)
    driver = int(runtime.driverGetVersion())
    devices = tuple(
        _device(index, runtime.getDeviceProperties(index), version, driver, compiler)
        for index in range(count)
    )
    dropped = [caps for caps in devices if compiler >= CUDA_13 and _is_dropped(caps)]
    if not dropped:
        return BackendStatus(NAME, devices=devices)
    names = ", ".join(f"{caps.id} ({caps.name})" for caps in dropped)
    return BackendStatus(
        NAME,
        detail=f"CuPy's CUDA {dotted(compiler)} no longer compiles for {names}",
        hint="For these, uninstall cupy-cuda13x and pip install 'kvkernels[cuda12]' (cupy-cuda12x)",
        devices=devices,
    )


def _is_dropped(caps: DeviceCaps) -> bool:
    have = caps.facts["compute_capability"]
    return isinstance(have, int) and 50 <= have < TURING


def _cupy(load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ModuleNotFoundError as error:
        if error.name == "cupy":
            raise Stop("CuPy is not installed", _INSTALL) from None
        raise Stop(f"CuPy cannot be imported: {text_of(error)}", _INSTALL) from None
    except Exception as error:
        hint = "Keep one CuPy package only, the one of this driver's CUDA; then " + _INSTALL
        raise Stop(f"CuPy cannot be imported: {text_of(error)}", hint) from None


def _count(runtime: Any, version: int) -> int:
    try:
        count = int(runtime.getDeviceCount())
    except Exception as error:
        status = getattr(error, "status", None)
        if status == _NO_DRIVER:
            raise _no_driver(runtime, version) from None
        if status in _ERRORS:
            raise Stop(*_ERRORS[status]) from None
        raise Stop(f"counting cards failed: {text_of(error)}", "Look at `nvidia-smi`") from None
    if count == 0:
        raise Stop(*_ERRORS[100])
    return count


def _no_driver(runtime: Any, version: int) -> Stop:
    try:
        driver = int(runtime.driverGetVersion())
    except Exception:
        driver = 0
    if driver == 0:
        hint = "Install the NVIDIA driver; in a container, start it with the cards passed through"
        return Stop("CuPy is installed, but no NVIDIA driver was found", hint)
    text = f"the driver is for CUDA {dotted(driver)}, this CuPy needs CUDA {dotted(version)}"
    hint = "Update the driver"
    if version >= CUDA_13 > driver:
        hint += ", or replace cupy-cuda13x: pip install 'kvkernels[cuda12]'"
    return Stop(text, hint)


def _nvrtc(cuda: Any, version: int) -> int:
    extra = "cuda13" if version >= CUDA_13 else "cuda12"
    try:
        major, minor = cuda.nvrtc.getVersion()
    except Exception as error:
        text = f"CuPy finds no NVRTC, the compiler of CUDA {dotted(version)}: {text_of(error)}"
        raise Stop(text, f"pip install 'kvkernels[{extra}]', which brings it") from None
    return int(major) * 1000 + int(minor) * 10


def _device(
    index: int, have: dict[str, Any], runtime: int, driver: int, compiler: int
) -> DeviceCaps:
    name = have["name"]
    capability = int(have["major"]) * 10 + int(have["minor"])
    facts: dict[str, Fact] = {
        "compute_capability": capability,
        "lanes": int(have["warpSize"]),
        "n_sm": int(have["multiProcessorCount"]),
        "max_threads": int(have["maxThreadsPerBlock"]),
        # Without opting in; no kernel of ours asks for more.
        "local_memory": int(have["sharedMemPerBlock"]),
        "memory": int(have["totalGlobalMem"]),
        "runtime": runtime,
        "driver": driver,
        "nvrtc": compiler,
        "target": target(capability, compiler),
    }
    return DeviceCaps(
        id=f"{NAME}:{index}",
        backend=NAME,
        name=name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name),
        driver=f"CUDA {dotted(driver)}",
        facts=facts,
        features={"fp64": Feature(True, True)},
    )
